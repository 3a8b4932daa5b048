"""Every rank's share of the data, accumulation windows, and moving to the device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from itertools import chain, repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import play, values
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import BatchEncoding

import unishard
from unishard.config import Config
from unishard.data.batches import length_of, to_device, windows
from unishard.errors import DataError, RankMismatchError
from unishard.failures import lifetime
from unishard.testing.ranks import run_ranks

pytestmark = pytest.mark.ranks

SAMPLES = 50
CPU = torch.device("cpu")


def config(micro: int = 4, accumulate: int = 1, seed: int = 0) -> Config:
    return Config.model_validate(
        {"training": {"micro_batch_size": micro, "gradient_accumulation_steps": accumulate, "seed": seed}}
    )


def ids(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


# -- each rank's share -----------------------------------------------------------------------------


def share(cfg: Config, options: dict[str, Any]) -> list[list[list[int]]]:
    """Two epochs of this rank, before there is a process group."""
    loader = unishard.dataloader(range(SAMPLES), cfg, **options)
    epochs = [ids(loader), ids(loader)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 2
    return epochs


def updates(ranks: list[list[list[int]]], accumulate: int) -> list[list[int]]:
    """Samples of each update over all ranks, in order: one epoch."""
    micro_batches = [batch for round_ in zip(*ranks, strict=True) for batch in round_]
    size = accumulate * len(ranks)
    return [flat(micro_batches[at : at + size]) for at in range(0, len(micro_batches), size)]


@pytest.fixture(scope="module")
def shares() -> dict[int, list[list[list[list[int]]]]]:
    """By number of ranks; the global batch is 16 samples for each."""
    return {
        world: run_ranks(world, share, config(micro=4, accumulate=4 // world), {"drop_last": True})
        for world in (1, 2, 4)
    }


def test_global_batches_are_the_same_for_any_number_of_ranks(shares: dict[int, Any]) -> None:
    for epoch in (0, 1):
        one, two, four = (updates([rank[epoch] for rank in shares[world]], 4 // world) for world in (1, 2, 4))
        assert one[:3] == two[:3] == four[:3]
        assert [len(update) for update in four] == [16, 16, 16]


def test_epochs_differ_and_repeat(shares: dict[int, Any]) -> None:
    first, second = shares[1][0]
    assert first != second
    assert flat(first) != sorted(flat(first))
    loader = unishard.dataloader(range(SAMPLES), config(), drop_last=True)
    assert [ids(loader), ids(loader)] == [first, second]
    assert ids(unishard.dataloader(range(SAMPLES), config(seed=1), drop_last=True)) != first


def test_every_micro_batch_is_full_and_every_rank_has_as_many() -> None:
    ranks = run_ranks(4, share, config(micro=4), {})  # 50 samples in rounds of 16
    for epoch in (0, 1):
        assert [len(rank[epoch]) for rank in ranks] == [4] * 4
        assert {len(batch) for rank in ranks for batch in rank[epoch]} == {4}
        order = flat(updates([rank[epoch] for rank in ranks], 1))
        assert sorted(order[:SAMPLES]) == list(range(SAMPLES))
        assert order[SAMPLES:] == order[:14], "filled up from the beginning of the order"


def test_unshuffled_is_the_order_of_the_dataset() -> None:
    loader = unishard.dataloader(range(6), config(micro=2), shuffle=False)
    assert ids(loader) == ids(loader) == [[0, 1], [2, 3], [4, 5]]


def test_reading_leaves_the_models_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    ids(unishard.dataloader(range(SAMPLES), config()))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_resumes_in_the_middle_of_an_epoch(workers: int) -> None:
    def fresh(state: dict[str, Any] | None = None) -> Any:
        loader = unishard.dataloader(range(SAMPLES), config(), num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    loader = fresh()
    first, before = ids(loader), loader.state_dict()
    reading = iter(loader)
    read = [next(reading).tolist() for _ in range(5)]
    middle = loader.state_dict()
    rest, third = ids(reading), ids(loader)
    second = read + rest
    assert len(second) == len(first)
    resumed = fresh(middle)
    assert [ids(resumed), ids(resumed)] == [rest, third]
    assert ids(fresh(before)) == second, "a state saved after an epoch begins the next one"
    assert ids(fresh(fresh().state_dict())) == first, "a state saved before the first batch begins the first one"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (unishard.dataloader(range(SAMPLES), config()).state_dict(), "dataset_length was 50, is 51; seed was 0, is 3"),
        (
            {"_num_yielded": 3, "_snapshot": {}},
            r"the state \(_num_yielded, _snapshot\) is not from a unishard.dataloader",
        ),
        ({}, r"the state \(\) is not from a unishard.dataloader"),
    ],
)
def test_a_state_of_another_order_or_loader_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        unishard.dataloader(range(SAMPLES + 1), config(seed=3)).load_state_dict(state)


def test_a_loader_says_in_which_epoch_reading_goes_on() -> None:
    loader = unishard.dataloader(range(6), config(micro=2))
    epochs = [loader.epoch for _ in range(2) for _ in loader]
    assert epochs == [0, 0, 1, 1, 1, 2]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, "cannot shard Stream"),
        ((number for number in range(3)), {}, "cannot shard generator"),
        ([], {}, "the dataset is empty"),
        (range(3), {"drop_last": True}, "has 3 samples, fewer than the 4"),
        (range(3), {"batch_size": 2}, "batch_size: it is set by training.micro_batch_size"),
        (range(3), {"sampler": [0]}, "does not accept sampler"),
        (range(3), {"in_order": False}, "does not accept in_order"),
    ],
)
def test_what_cannot_be_divided_is_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        unishard.dataloader(dataset, config(), **options)


# -- windows ---------------------------------------------------------------------------------------


def unsized(batches: list[int]) -> Any:
    return (batch for batch in batches)


def windows_of(counts: tuple[int, ...], length: int, drop: bool, sized: bool) -> list[list[int]]:
    """The windows of a loader with as many batches as `counts` says for this rank."""
    lifetime.ensure(unishard.Topology.from_environment())
    batches = list(range(counts[dist.get_rank()]))
    return [list(window) for window in windows(batches if sized else unsized(batches), repeat(length), CPU, drop=drop)]


WINDOWS = {
    (5, 2, False): [[0, 1], [2, 3], [4]],
    (5, 2, True): [[0, 1], [2, 3]],
    (4, 2, False): [[0, 1], [2, 3]],
    (4, 2, True): [[0, 1], [2, 3]],
    (1, 3, False): [[0]],
    (1, 3, True): [],
    (0, 3, False): [],
}
"""By number of batches, length, and whether a short window is dropped."""


def test_the_last_window() -> None:
    cases = {((count, count), *how, sized): WINDOWS[count, *how] for count, *how in WINDOWS for sized in (True, False)}
    played = play(tuple((windows_of, case) for case in cases))
    for case, expected in cases.items():
        assert values(played[windows_of, case]) == [expected, expected], case


def mismatch_of(counts: tuple[int, ...], length: int, sized: tuple[bool, ...]) -> tuple[list[list[int]], str]:
    """What this rank got before the error, and the error."""
    lifetime.ensure(unishard.Topology.from_environment())
    rank = dist.get_rank()
    batches = list(range(counts[rank]))
    got: list[list[int]] = []
    try:
        got.extend(
            list(window)
            for window in windows(batches if sized[rank] else unsized(batches), repeat(length), CPU, drop=False)
        )
    except RankMismatchError as error:
        return got, str(error)
    return got, ""


MISMATCHES: dict[Any, tuple[list[list[int]], str]] = {
    ((7, 4), 2, (True, True)): ([], "len(loader): rank 0 has 7, rank 1 has 4"),
    ((7, 4), 2, (False, False)): ([[0, 1], [2, 3]], "batches after 4: rank 0 has 2, rank 1 has 0"),
    ((4, 4), 2, (True, False)): ([], "rank 0 has 4, rank 1 has None"),
}


@pytest.mark.parametrize("case", MISMATCHES, ids=str)
def test_uneven_loaders_are_refused_on_every_rank_before_the_window_that_differs(case: Any) -> None:
    for got, message in values(play(tuple((mismatch_of, each) for each in MISMATCHES))[mismatch_of, case]):
        assert got == MISMATCHES[case][0]
        assert MISMATCHES[case][1] in message


def test_the_length_of_an_iterable_dataset_is_not_believed() -> None:
    class Liar(Stream):
        def __len__(self) -> int:
            return 100

    assert length_of(DataLoader(Liar())) is None
    assert length_of(DataLoader(Stream())) is None
    assert length_of(DataLoader(range(5), batch_size=2)) == 3  # type: ignore[arg-type]


# -- to_device -------------------------------------------------------------------------------------

META = torch.device("meta")


class Pair(NamedTuple):
    left: Tensor
    right: int


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: Tensor
    length: int = dataclasses.field(init=False, default=3)


class Mover:
    def to(self, device: torch.device) -> str:
        return f"moved to {device}"


def test_every_nested_tensor_moves() -> None:
    one = torch.ones(2)
    batch = {
        "a": one,
        "b": [one, "text", {"c": (one, 1)}],
        "pair": Pair(one, 1),
        "sample": Sample(one),
        "mover": Mover(),
    }
    moved = to_device(batch, META)
    assert moved["a"].device == moved["b"][0].device == moved["b"][2]["c"][0].device == META
    assert moved["b"][1] == "text"
    assert isinstance(moved["pair"], Pair)
    assert (moved["pair"].left.device, moved["pair"].right) == (META, 1)
    assert (moved["sample"].ids.device, moved["sample"].length) == (META, 3)
    assert moved["mover"] == "moved to meta"
    assert batch["a"].device == batch["b"][0].device == batch["sample"].ids.device == torch.device("cpu"), (
        "the original is left alone"
    )


def test_containers_keep_their_type() -> None:
    one = torch.ones(2)
    assert to_device(defaultdict(list, a=one), META).default_factory is list
    assert isinstance(to_device(OrderedDict(a=one), META), OrderedDict)
    assert to_device(MappingProxyType({"a": one}), META)["a"].device == META
    encoding = to_device(BatchEncoding({"input_ids": one}), META)
    assert isinstance(encoding, BatchEncoding)
    assert encoding["input_ids"].device == META


@pytest.mark.parametrize(
    "batch",
    [
        {"a": [torch.ones(2)], "b": (1, "x")},
        [torch.ones(1)],
        Pair(torch.ones(1), 2),
        Sample(torch.ones(1)),
        "x",
        None,
        3,
    ],
)
def test_what_is_there_already_is_returned_as_it_is(batch: Any) -> None:
    assert to_device(batch, torch.device("cpu")) is batch


@pytest.mark.parametrize("kind", [dict, BatchEncoding, lambda batch: [batch]])
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_to_a_gpu_wait_for_nothing(monkeypatch, kind, pinned) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append("pinned") or tensor.clone())
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, non_blocking=False: asked.append(non_blocking) or tensor.clone()
    )
    to_device(kind({"input_ids": torch.ones(2), "labels": torch.ones(3)}), torch.device("cuda", 0))
    assert asked == ([True, True] if pinned else ["pinned", True, "pinned", True])
