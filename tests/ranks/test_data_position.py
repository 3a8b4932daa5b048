"""A run that stops and goes on sees the samples that it would have seen without the stop, in the same updates."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import pytest
import torch
from harness import config, own_share, prepare, train
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import unishard
from unishard.checkpoint.user_state import pack, unpack
from unishard.data import position
from unishard.data.batches import windows
from unishard.data.loader import ShareLoader
from unishard.data.position import LoaderPass
from unishard.data.sampler import ShareSampler
from unishard.errors import DataError
from unishard.testing import run_ranks
from unishard.testing.models import batch

pytestmark = pytest.mark.ranks

SAMPLES, MICRO, GLOBAL = 50, 2, 8
EPOCHS = 3
CPU = torch.device("cpu")


def sampler(rank: int, world: int, micro: int = MICRO, length: int = SAMPLES, **options: Any) -> ShareSampler:
    return ShareSampler(
        length, micro, rank=rank, world_size=world, seed=7, **{"shuffle": True, "drop_last": False} | options
    )


# -- the order -------------------------------------------------------------------------------------


def global_order(samplers: Sequence[ShareSampler], rounds: int | None = None) -> list[int]:
    """What all ranks read, in the order in which they read it."""
    shares = [list(sampler)[:rounds] for sampler in samplers]
    return [index for turn in zip(*shares, strict=True) for micro_batch in turn for index in micro_batch]


@given(
    length=st.integers(1, 60),
    then=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    now=st.tuples(st.integers(1, 4), st.integers(1, 5)),
    rounds=st.integers(0, 20),
    epoch=st.integers(0, 3),
)
def test_the_rest_follows_for_any_number_of_ranks_and_any_micro_batch_size(length, then, now, rounds, epoch):
    before, after = ([sampler(rank, world, micro, length) for rank in range(world)] for world, micro in (then, now))
    for share in before:
        share.epoch = epoch
    seen = global_order(before, rounds)
    for share in after:
        share.epoch, share.samples = epoch, len(seen)
    order = before[0].order(epoch).tolist()
    seen += global_order(after)
    assert seen[:length] == order
    filled = seen[length:]
    assert filled == (order * (len(filled) // length + 1))[: len(filled)], (
        "the last round is filled up from the beginning"
    )


# -- updates ---------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Samples of each update of each epoch, and where the ranks were at the stop."""

    epochs: list[list[list[int]]]
    positions: list[dict[str, Any]]


def full(window: int) -> Callable[[int], int]:
    """Those of some batches that are in full windows."""
    return lambda batches: batches - batches % window


def run(
    world: int,
    *,
    stop: int | None = None,
    since: Run | None = None,
    workers: int = 0,
    drop_window: bool = False,
    **options: Any,
) -> Run:
    """Train on all ranks in turn, to the end or for `stop` updates, with the same global batch for any number of
    ranks."""
    accumulate = GLOBAL // (world * MICRO)
    loaders = [
        ShareLoader(range(SAMPLES), sampler(rank, world, **options), num_workers=workers) for rank in range(world)
    ]
    done = [0] * world
    if since is not None:
        done = [
            position.resume(loader, since.positions, len(since.positions), rank, world)
            for rank, loader in enumerate(loaders)
        ]
    epochs: list[list[list[int]]] = []
    for _ in range(loaders[0].epoch, EPOCHS):
        readings = [
            LoaderPass(loader, batches, full(accumulate if drop_window else 1))
            for loader, batches in zip(loaders, done, strict=True)
        ]
        done = [0] * world
        epochs.append([])
        for turn in zip(
            *(windows(reading, repeat(accumulate), CPU, drop=drop_window, enter=None) for reading in readings),
            strict=True,
        ):
            epochs[-1].append(
                [index for batches in zip(*turn, strict=True) for batch in batches for index in batch.tolist()]
            )
            if stop is not None and sum(map(len, epochs)) == stop:
                return Run(epochs, json.loads(json.dumps([reading.position() for reading in readings])))
    return Run(epochs, [])


OPTIONS = [
    {},
    {"shuffle": False},
    {"drop_last": True},
    {"drop_window": True},
    {"drop_last": True, "drop_window": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize(("then", "now"), [(2, 2), (2, 4), (4, 1), (1, 2)])
def test_updates_are_those_of_an_uninterrupted_run(then, now, options):
    whole_then, whole_now = run(then, **options).epochs, run(now, **options).epochs
    full = SAMPLES // GLOBAL
    assert [epoch[:full] for epoch in whole_then] == [epoch[:full] for epoch in whole_now]
    lengths = [len(epoch) for epoch in whole_then]
    for stop in (1, 3, lengths[0] - 1, lengths[0], lengths[0] + 2, sum(lengths[:2])):
        first = run(then, stop=stop, **options)
        rest = run(now, since=first, **options)
        assert list(chain(*first.epochs)) == list(chain(*whole_then))[:stop]
        epoch, into = divmod(stop, lengths[0])
        assert position.epoch_of(first.positions[0]) == epoch
        assert rest.epochs == [whole_now[epoch][into:], *whole_now[epoch + 1 :]], f"stopped after {stop} updates"


def test_workers_that_stay_alive_read_every_epoch():
    shares = ShareLoader(range(SAMPLES), sampler(0, 1), num_workers=1, persistent_workers=True)
    epochs = [[index for batch in shares for index in batch.tolist()] for _ in range(2)]
    assert epochs == [list(chain(*epoch)) for epoch in run(1).epochs[:2]]


@pytest.mark.parametrize(("workers_then", "workers_now"), [(2, 2), (2, 0), (0, 2)])
def test_nothing_that_workers_have_read_ahead_is_lost(workers_then, workers_now):
    whole = run(2).epochs
    for stop in (3, len(whole[0])):
        first = run(1, stop=stop, workers=workers_then)
        rest = run(2, since=first, workers=workers_now)
        assert rest.epochs == ([whole[0][3:], *whole[1:]] if stop == 3 else whole[1:])


# -- loaders of others -----------------------------------------------------------------------------


def foreign(rank: int, world: int, workers: int) -> StatefulDataLoader[Any]:
    """A user's own loader, which shuffles this rank's share by torch's global random numbers."""
    return StatefulDataLoader(range(rank, SAMPLES, world), batch_size=4, shuffle=True, num_workers=workers)


def of_torch(**options: Any) -> Callable[[int], Any]:
    """A torch DataLoader over the half of the samples, with so many workers."""

    def make(workers: int) -> Any:
        made = {name: value() if callable(value) else value for name, value in options.items()}
        loader = DataLoader(range(0, SAMPLES, 2), batch_size=4, num_workers=workers, **made)
        return position.with_position(loader, loader)

    return make


LOADERS = {
    "torchdata": lambda workers: foreign(0, 2, workers),
    "shuffled": of_torch(shuffle=True),
    "with a generator": of_torch(shuffle=True, generator=lambda: torch.Generator().manual_seed(3)),
    "weighted": of_torch(sampler=lambda: WeightedRandomSampler([1.0, 2.0] * 12 + [3.0], 25)),
    "subset": of_torch(sampler=lambda: SubsetRandomSampler(range(25))),
    "distributed": of_torch(sampler=lambda: DistributedSampler(range(25), num_replicas=1, rank=0)),
}


class Stop(NamedTuple):
    """After an update: where the loader was, and torch's random numbers."""

    position: dict[str, Any]
    random: Any


def epoch_of_others(reading: LoaderPass, window: int) -> tuple[list[list[int]], list[Stop]]:
    """Samples of each update, with a number that the model has drawn; and where everything was after it."""
    seen: list[list[int]] = []
    stops: list[Stop] = []
    for batches in windows(reading, repeat(window), CPU, drop=True, enter=None):
        seen.append([*torch.cat(list(batches)).tolist(), torch.rand(()).item()])
        stops.append(Stop(copy.deepcopy(reading.position()), torch.get_rng_state()))
    return seen, stops


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_others_goes_on_at_the_same_number_of_ranks(kind, workers, window):
    torch.manual_seed(0)
    make = LOADERS[kind]
    loader = make(workers)
    first, stops = epoch_of_others(LoaderPass(loader, 0, full(window)), window)
    second, _ = epoch_of_others(LoaderPass(loader, 0, full(window)), window)
    assert first != second
    for updates, stop in ((1, stops[0]), (2, stops[1]), (len(stops), stops[-1])):
        fresh = make(workers)
        value, tensors = pack(stop.position)
        saved = unpack(json.loads(json.dumps(value)), tensors.__getitem__)
        torch.set_rng_state(stop.random)
        done = position.resume(fresh, [saved, saved], 2, 0, 2)
        rest = LoaderPass(fresh, done, full(window))
        assert len(rest) == 7 - (updates * window if updates < len(stops) else 0)
        seen, _ = epoch_of_others(rest, window)
        assert seen == (first[updates:] if updates < len(stops) else second), f"stopped after {updates} updates"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_of_others_is_refused_where_it_cannot_go_on():
    loader = unishard.dataloader(range(8), config("fsdp"))
    theirs, ours = LoaderPass(foreign(0, 2, 0), 0, full(1)).position(), LoaderPass(loader, 0, full(1)).position()
    with pytest.raises(DataError, match="StatefulDataLoader was saved on 2 ranks and cannot be resumed on 4"):
        position.resume(foreign(0, 4, 0), [theirs, theirs], 2, 0, 4)
    with pytest.raises(DataError, match=r"a unishard\.dataloader, but this run uses a StatefulDataLoader"):
        position.resume(foreign(0, 2, 0), [ours, ours], 2, 0, 2)
    with pytest.raises(DataError, match=r"a StatefulDataLoader, but this run uses a unishard\.dataloader"):
        position.resume(loader, [theirs, theirs], 2, 0, 2)


def test_a_loader_of_torch_says_why_it_starts_over():
    loader = LOADERS["shuffled"](0)
    where = LoaderPass(loader, 0, full(1)).position()
    other = DataLoader(range(25), batch_size=5)
    ours = unishard.dataloader(range(8), config("fsdp"))
    for now, world, why in (
        (loader, 1, None),
        (loader, 2, "it was saved on 1 rank"),
        (position.with_position(other, other), 1, "batch_size was 4, is 5"),
        (
            ours,
            1,
            "the checkpoint's data position is for a torch.utils.data.DataLoader, and this run uses a unishard.dataloader",
        ),
    ):
        said = position.starts_over(now, [where], 1, 0, world)
        assert (said is None) if why is None else (why in said)
    unordered = DataLoader(range(8), sampler=[3, 1])
    assert position.with_position(unordered, unordered) is None


# -- the engine ------------------------------------------------------------------------------------

ROWS = 18
"""On 2 ranks in micro-batches of 2 and windows of 2, an epoch is 3 updates, the last one of half a window."""
STOPS = (0, 1, 3, 4, 6)
"""Updates, over 2 epochs."""


class Engine(NamedTuple):
    """What reads the rows: on any number of ranks, 8 of them in an update."""

    backend: str
    accumulate: int
    inline: bool = False
    """Whether a loader is built anew in each epoch."""


def rows() -> list[dict[str, Any]]:
    """The model's samples, each with its number."""
    return [{name: value[0] for name, value in batch("mlp", row, 1).items()} | {"row": row} for row in range(ROWS)]


Epochs = list[list[list[list[int]]]]
"""Rows of a rank's micro-batches by epoch and update."""


def several(kind: Engine, cases: list[tuple[list[Any], int | None]]) -> list[tuple[Epochs, Any]]:
    """Runs from the positions of others (if any) to a stop (else to the end of 2 epochs), and their positions there."""
    cfg = config(kind.backend, "shard_optimizer", training={"gradient_accumulation_steps": kind.accumulate})
    with prepare(cfg) as engine:
        return [one(engine, loaders_of(rows(), cfg, inline=kind.inline), *case) for case in cases]


def loaders_of(data: list[Any], cfg: Any, *, inline: bool) -> Callable[[], Any]:
    """The loader of an epoch: always the same, or a new one over the same data."""
    loader = unishard.dataloader(data, cfg)
    return (lambda: unishard.dataloader(data, cfg)) if inline else lambda: loader


def one(engine: Any, loader: Callable[[], Any], positions: list[Any], stop: int | None) -> tuple[Epochs, Any]:
    first = 0
    if positions:
        engine._batching.resume(positions, len(positions))
        first = position.epoch_of(positions[0])
        assert engine._batching.position()["state"] == positions[0]["state"], "saved again before it has gone on"
    epochs: Epochs = []
    done = 0
    for _ in range(first, 2):
        epochs.append([[]])
        for micro_batch in engine.batches(loader()):
            if done == stop:
                return epochs, engine._batching.position()  # a batch is out that is not trained on
            epochs[-1][-1].append(micro_batch.pop("row").tolist())
            engine.backward(engine(**micro_batch).loss)
            if engine.step().updated:
                done += 1
                epochs[-1].append([])
                if done == stop and stop % 2:
                    return epochs, engine._batching.position()
        epochs[-1].pop()
    return epochs, engine._batching.position()


def together(ranks: Sequence[list[list[list[list[int]]]]]) -> list[list[list[int]]]:
    """Rows by epoch and update over all ranks, in the global order."""
    return [
        [
            [row for turn in zip(*update, strict=True) for part in turn for row in part]
            for update in zip(*epoch, strict=True)
        ]
        for epoch in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_goes_on_where_two_ranks_of_another_were(world):
    stopped = run_ranks(2, several, Engine("fsdp", 2, inline=world == 2), [([], stop) for stop in STOPS])
    cases: list[tuple[list[Any], int | None]] = [([], None)]
    cases += [(json.loads(json.dumps([rank[index][1] for rank in stopped])), None) for index in range(len(STOPS))]
    whole, *rests = zip(
        *run_ranks(world, several, Engine("deepspeed", 4 // world, inline=world == 1), cases), strict=True
    )
    epochs = together([updates for updates, _ in whole])
    assert [len(epoch) for epoch in epochs] == [3, 3]
    for stop, rest in zip(STOPS, rests, strict=True):
        epoch, into = divmod(stop, 3)
        wanted = [epochs[epoch][into:], *epochs[epoch + 1 :]] if epoch < 2 else []
        assert together([updates for updates, _ in rest]) == wanted, f"stopped after {stop} updates"
        assert {where["state"]["epoch"] for _, where in rest} == {2}


def manners() -> dict[str, Any]:
    """What the engine takes for the position of its data, in less common loops."""
    cfg = config("fsdp", training={"gradient_accumulation_steps": 2})
    said: dict[str, Any] = {}

    def samples() -> int:
        return engine._batching.position()["state"]["samples"]

    with prepare(cfg) as engine:
        said["no loader"] = engine._batching.position()
        train(engine, own_share(2))
        said["a list"] = engine._batching.position()
        loader = unishard.dataloader(rows(), cfg)
        for turn, micro_batch in enumerate(engine.batches(loader)):
            micro_batch.pop("row")
            engine.backward(engine(**micro_batch).loss)
            if turn == 0:
                said["inside a window"] = samples()
                engine.discard()
                said["a window that was dropped"] = samples()
            elif engine.step().updated:
                break
        engine.eval()
        said["validation"] = [samples() for _ in engine.batches(unishard.dataloader(rows(), cfg))][-1]
        engine.train()
        state = engine._batching.position()
        engine._batching.resume([state, state], 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(engine, own_share(2))
        said["warned"] = [str(warning.message) for warning in caught if "data position" in str(warning.message)]
        windows_left = [len(window) for window in islice(engine.windows(loader), 1)]
        said["the next training loader"] = (windows_left, samples())
    return said


def test_the_position_is_that_of_the_windows_that_are_done():
    for said in run_ranks(2, manners):
        (warned,) = said.pop("warned")
        assert warned.startswith(
            "list has no load_state_dict, so it starts from its beginning and not at the checkpoint's data position; "
        )
        assert said == {
            "no loader": None,
            "a list": None,
            "inside a window": 0,
            "a window that was dropped": 8,
            "validation": 16,
            "the next training loader": ([1], 16),
        }
