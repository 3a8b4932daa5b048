"""How a save is planned: in arrays, each interval once, and not again if the next save has the same tensors."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from unishard.checkpoint import index_classes, index_file, metadata, planning, writing
from unishard.checkpoint.assignment import Assignment
from unishard.checkpoint.box_tables import box_table
from unishard.checkpoint.holdings import intervals_of, packed
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.tensor_reader import Tensors
from unishard.distributed.boxes import boxes
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.errors import CheckpointError


def shard(shape: tuple[int, ...], begin: int, end: int, dtype: torch.dtype = torch.float32) -> LazyShard:
    return LazyShard(torch.Size(shape), dtype, begin, end, lambda first, last: torch.empty(0))


@pytest.mark.parametrize("shape", [(), (1,), (13,), (4, 6), (3, 4, 5), (2, 1, 3, 2), (1, 1, 7)])
def test_boxes_of_many_intervals_are_those_of_each(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    intervals = [(begin, end) for begin in range(numel) for end in range(begin + 1, numel + 1)]
    table = box_table(shape, [begin for begin, _ in intervals], [end for _, end in intervals])
    expected = [(source, *box) for source, interval in enumerate(intervals) for box in boxes(shape, *interval)]
    found = zip(
        table.source.tolist(), map(tuple, table.offsets.tolist()), map(tuple, table.sizes.tolist()), strict=True
    )
    assert list(found) == expected
    for first, last, sizes in zip(table.first.tolist(), table.last.tolist(), table.sizes.tolist(), strict=True):
        assert last - first == torch.Size(sizes).numel()


def plan_of(*ranks: Mapping[str, LazyShard], chunk: int = 1 << 24) -> Assignment:
    return Assignment([packed(intervals_of(rank)) for rank in ranks], chunk)


def test_every_element_is_written_once_and_copies_are_divided() -> None:
    """Random shards of three tensors in two copies, cut in chunks, and a tensor that all ranks hold."""
    chance = random.Random(0)
    shapes = {"model.a": (16, 9), "model.b": (100,), "optim.state.a.exp_avg": (5, 4, 3)}
    for chunk in (40, 1 << 20):
        cuts = {name: sorted(chance.sample(range(1, torch.Size(shape).numel()), 2)) for name, shape in shapes.items()}
        ranks = []
        for rank in range(6):
            bounds = {name: [0, *cuts[name], torch.Size(shape).numel()] for name, shape in shapes.items()}
            ranks.append(
                {name: shard(shape, *bounds[name][rank % 3 :][:2]) for name, shape in shapes.items()}
                | {"model.x": shard((7,), 0, 7)}
            )
        plan = plan_of(*ranks, chunk=chunk)
        records = [200] * sum(plan._records)
        places = plan.places(np.split(np.array(records), np.cumsum(plan._records)[:-1]), [0] * 6)
        for number, tensor in enumerate(places.tensors):
            first, last, rank, _at, _length = places.of(number)
            assert first[0] == 0
            assert last[-1] == torch.Size(tensor.shape).numel()
            assert (first[1:] == last[:-1]).all()
        everything = [
            each
            for number in range(4)
            for each in zip(*(column.tolist() for column in places.of(number)[2:4]), strict=True)
        ]
        assert len(set(everything)) == len(everything), "two records in one place"
        assert len({rank for rank, _ in everything}) == 6, "a rank that writes nothing"


REFUSED = {
    "no rank holds some or all elements of model.a": (
        {"model.a": shard((10,), 0, 4)},
        {"model.a": shard((10,), 5, 10)},
    ),
    "no rank holds some or all elements of model.b": ({"model.b": shard((10,), 0, 0)}, {"model.b": shard((10,), 0, 9)}),
    "ranks hold overlapping elements of model.c": ({"model.c": shard((10,), 0, 6)}, {"model.c": shard((10,), 5, 10)}),
    "ranks hold overlapping elements of model.d": ({"model.d": shard((10,), 0, 6)}, {"model.d": shard((10,), 0, 10)}),
    "ranks hold model.e with different dtypes or shapes": (
        {"model.e": shard((10,), 0, 6)},
        {"model.e": shard((9,), 6, 9)},
    ),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_shards_that_are_no_tensor_are_refused(problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plan_of(*REFUSED[problem])


# -- torch's index ---------------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
def test_the_index_is_the_one_that_torch_would_pickle(large: bool) -> None:
    """With numbers of 4 bytes and of 8, no dims and three, two names of a tensor, and more files than the memo has
    short numbers."""
    world, length = 300, 1 << 33 if large else 700
    shapes = {"model.a": (world, 3), "model.s": (), "model.low": (world, 2, 3), "optim.state.a.step": ()}
    dtypes = {"model.low": torch.bfloat16}
    ranks = []
    for rank in range(world):
        sizes = {name: torch.Size(shape).numel() // world for name, shape in shapes.items()}
        ranks.append(
            {
                name: shard(
                    shape, rank * sizes[name], (rank + 1) * sizes[name] if shape else 1, dtypes.get(name, torch.float32)
                )
                for name, shape in shapes.items()
            }
        )
    plan = plan_of(*ranks)
    places = plan.places([np.full(count, length) for count in plan._records], [0] * world)
    entries = [(tensor.name, number, places) for number, tensor in enumerate(places.tensors)]
    entries.append(("model.alias", *next(each[1:] for each in entries if each[0] == "model.a")))
    files = [f"__{rank}_0.distcp" for rank in range(world)]
    paths = {name: tuple(name.split(".", 1)) for name, *_ in entries}
    found = pickle.loads(b"".join(index_file.pieces(entries, files, paths)))
    expected = Metadata({}, paths, {}, StorageMeta(), *([found.version] if hasattr(found, "version") else []))
    for name, number, _ in entries:
        tensor = places.tensors[number]
        chunks = []
        for row, (first, last, rank, at, size) in enumerate(
            zip(*(column.tolist() for column in places.of(number)), strict=True)
        ):
            ((offsets, sizes),) = boxes(tensor.shape, first, last)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            expected.storage_data[MetadataIndex(name, offsets, row)] = index_classes.place(files[rank], at, size)
        expected.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
        )
    assert found == expected
    assert [*found.state_dict_metadata] == [*expected.state_dict_metadata]
    assert {index: index.index for index in found.storage_data} == {
        index: index.index for index in expected.storage_data
    }
    assert type(found.state_dict_metadata["model.a"].chunks[0].offsets) is torch.Size


# -- the next save ---------------------------------------------------------------------------------


def contents(version: int, more: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """A model, and a random state of another length in each version."""
    return {
        "model.a.weight": torch.arange(231.0).reshape(7, 11, 3) + version,
        "model.scalar": torch.tensor(float(version)),
        "rng.rank00000.python": torch.full((50 + version,), version, dtype=torch.uint8),
        **(more or {}),
    }


def put(folder: Path, tensors: Mapping[str, torch.Tensor], cache: PlanCache | None = None) -> None:
    shards = {name: lazy_shard_of(Shard(value.shape, value)) for name, value in tensors.items()}
    assert writing.write(folder, shards, ties={"b": "a.weight"}, cache=cache) is not None


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the tensors of each plan that is made."""
    made: list[list[str]] = []

    class Counted(Assignment):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append([tensor.name for tensor in self.tensors])

    monkeypatch.setattr(planning, "Assignment", Counted)
    monkeypatch.setattr(writing, "CHUNK", 64)
    return made


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_second_save_plans_only_what_may_have_another_length(tmp_path: Path, planned: list[list[str]]) -> None:
    cache = PlanCache()
    put(tmp_path / "first", contents(1), cache)
    assert planned == [["model.a.weight", "model.scalar"], ["rng.rank00000.python"]]
    del planned[:]
    put(tmp_path / "second", contents(2), cache)
    assert planned == [["rng.rank00000.python"]]
    put(tmp_path / "plain", contents(2))
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "second" / file.name).read_bytes() == file.read_bytes(), file.name
    assert metadata.read(tmp_path / "second").state_dict_metadata["rng.rank00000.python"].size == torch.Size((52,))
    for name, value in contents(2).items():
        assert torch.equal(Tensors(tmp_path / "second").full(name), value)
    dcp_to_torch_save(tmp_path / "second", tmp_path / "all.pt")
    assert torch.equal(torch.load(tmp_path / "all.pt")["model"]["b"], contents(2)["model.a.weight"])


@pytest.mark.parametrize(
    "more",
    [
        {"optim.state.a.weight.exp_avg": torch.ones(231)},
        {"model.scalar": torch.ones(3)},
        {"model.scalar": torch.tensor(1)},
    ],
    ids=["state that appears", "another shape", "another dtype"],
)
def test_a_change_is_planned(tmp_path: Path, planned: list[list[str]], more: Mapping[str, torch.Tensor]) -> None:
    cache = PlanCache()
    put(tmp_path / "first", contents(1), cache)
    del planned[:]
    put(tmp_path / "second", contents(2, more), cache)
    assert len(planned) == 2
    for name, value in contents(2, more).items():
        assert torch.equal(Tensors(tmp_path / "second").full(name), value)


def test_after_a_failure_a_save_is_planned_again(tmp_path: Path, planned: list[list[str]]) -> None:
    cache = PlanCache()
    put(tmp_path / "first", contents(1), cache)
    with pytest.raises(CheckpointError):
        put(tmp_path / "first", contents(2), cache)  # where there is a checkpoint already
    del planned[:]
    put(tmp_path / "second", contents(2), cache)
    assert len(planned) == 2


def test_a_rank_that_plans_nothing_sends_only_its_own_states(tmp_path: Path) -> None:
    cache, shards = PlanCache(), {f"model.{number}": shard((64, 64), 0, 4096) for number in range(1000)}
    planner = writing._Planner(shards, cache)
    first = len(pickle.dumps(planner.create_local_plan()))
    planner.reuses = True
    assert len(pickle.dumps(planner.create_local_plan())) < 500
    assert first < 12 * 1000, "names and bounds are packed"
