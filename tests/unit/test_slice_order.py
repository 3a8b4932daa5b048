"""Slices of any dimension as intervals of the full tensor, and what checkpoints make of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from unishard.checkpoint import writing
from unishard.checkpoint.box_tables import box_table
from unishard.checkpoint.export.plan import ExportedTensor
from unishard.checkpoint.hashing import MASK, hash_of, hash_of_shard
from unishard.checkpoint.tensor_reader import ReadRequest, Tensors
from unishard.contract.kit.materialization import set_reader, take_reader
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.distributed.slice_order import MEMORY_ORDER
from unishard.distributed.slices import Slice
from unishard.engine.state.full_tensors import full_tensors
from unishard.parallel.cutting import cut


class Sliced:
    """A full tensor, and the shards of its slices that ranks hold."""

    def __init__(self, shape: tuple[int, ...], part: Slice, holders: int, dtype: torch.dtype = torch.float32) -> None:
        self.full = torch.arange(math.prod(shape)).view(shape).to(dtype)
        self.parts = [part._replace(number=number) for number in range(part.of)]
        self.order, self.holders = part.order, holders

    def shards(self) -> list[LazyShard]:
        """In slice order; the values are only of the slices."""
        made, before = [], 0
        for part in self.parts:
            own = part.cut(self.full).contiguous().view(-1)
            bounds = [len(own) * rank // self.holders for rank in range(self.holders + 1)]
            for begin, end in pairwise(bounds):
                made.append(self._lazy(own[begin:end], before + begin))
            before += len(own)
        return made

    def _lazy(self, values: Tensor, start: int) -> LazyShard:
        group: Any = object()  # some ranks
        return lazy_shard_of(Shard(self.full.shape, values, start, group, self.order))


@st.composite
def sliced(draw: st.DrawFn) -> Sliced:
    """Of up to four dimensions, of which one is cut."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    of, packed = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    shape[dim] *= of * packed
    dtype = draw(st.sampled_from([torch.float32, torch.int16, torch.uint8]))
    return Sliced(tuple(shape), Slice(0, of, None, None, dim, packed), draw(st.integers(1, 3)), dtype)


@given(sliced())
def test_a_shard_of_a_slice_is_an_interval_of_the_full_tensor(case: Sliced) -> None:
    counted = case.order.counted(case.full)
    for shard in case.shards():
        assert torch.equal(counted[shard.start : shard.end], shard.read(shard.start, shard.end))
    assert torch.equal(case.order.full(counted, case.full.shape), case.full)


@given(sliced())
def test_boxes_say_where_its_elements_lie(case: Sliced) -> None:
    for shard in case.shards():
        for held in case.order.boxes(shard.shape, shard.start, shard.end):
            box = case.full[tuple(slice(at, at + size) for at, size in zip(*held.box, strict=True))]
            assert torch.equal(box.reshape(-1), shard.read(held.first, held.last))


@given(sliced())
def test_its_hash_is_the_share_of_the_whole_tensors(case: Sliced) -> None:
    added = [
        hash_of_shard(each.read(each.start, each.end), each.start, each.shape, each.order) for each in case.shards()
    ]
    assert sum(added) & MASK == hash_of(case.full)


@given(sliced(), st.data())
def test_full_tensors_and_parts_of_them_are_made_of_shards(case: Sliced, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.full.numel() - 1))
    count = data.draw(st.integers(1, case.full.numel() - start))
    wanted = [
        ExportedTensor("full", "x", tuple(case.full.shape), case.full.dtype),
        ExportedTensor("part", "x", (count,), case.full.dtype, start),
    ]
    made = [full_tensors(wanted, {"x": shard}, None, torch.device("cpu")) for shard in case.shards()]
    full, part = (sum(each) for each in zip(*made, strict=True))  # as ranks add them up
    assert torch.equal(full, case.full)
    assert torch.equal(part, case.full.view(-1)[start : start + count])


@given(sliced(), st.data())
def test_a_rank_reads_only_its_slice_of_a_model_too_large_for_it(case: Sliced, data: st.DataObject) -> None:
    for part in case.parts:
        parameter = nn.Parameter(torch.empty(case.full.shape, device="meta"), requires_grad=False)
        set_reader(parameter, lambda begin, end: case.full.view(-1)[begin:end])
        undo = cut(parameter, part)
        begin = data.draw(st.integers(0, parameter.numel() - 1))
        end = data.draw(st.integers(begin + 1, parameter.numel()))
        reader = take_reader(parameter)
        assert reader is not None
        assert torch.equal(reader(begin, end), part.cut(case.full).reshape(-1)[begin:end])
        undo()
        assert parameter.shape == case.full.shape


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=sliced())
def test_a_checkpoint_of_slices_is_that_of_the_whole_tensor(
    case: Sliced, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "CHUNK", 16)
    folder = tmp_path_factory.mktemp("sliced")
    everything = case.order.counted(case.full)
    all_of_it = LazyShard(
        case.full.shape, case.full.dtype, 0, len(everything), lambda begin, end: everything[begin:end], case.order
    )
    result = writing.write(folder, {"model.x": all_of_it}, single_process=True)
    assert result is not None
    assert result.hashes == {"model.x": hash_of(case.full)}
    tensors = Tensors(folder)
    assert torch.equal(tensors.full("model.x"), case.full)
    for shard in case.shards():
        values = torch.empty(shard.end - shard.start, dtype=shard.dtype)
        tensors.require("model.x", shard.shape, shard.interval, shard.order)
        tensors.read([ReadRequest("model.x", shard.start, values, shard.order)])
        assert torch.equal(values, shard.read(shard.start, shard.end))


@given(sliced())
def test_tables_of_boxes_are_the_boxes(case: Sliced) -> None:
    piece = math.prod(case.order.piece(case.full.shape))
    bounds = [*range(0, case.full.numel(), piece), case.full.numel()]
    table = box_table(case.full.shape, bounds[:-1], bounds[1:], case.order)
    found = [
        (tuple(offsets), tuple(sizes))
        for offsets, sizes in zip(table.offsets.tolist(), table.sizes.tolist(), strict=True)
    ]
    assert found == [held.box for held in case.order.boxes(case.full.shape, 0, case.full.numel())]
    assert table.first.tolist() == [held.first for held in case.order.boxes(case.full.shape, 0, case.full.numel())]


def test_a_number_is_a_full_tensor() -> None:
    number = torch.tensor(3.0)
    assert torch.equal(MEMORY_ORDER.full(MEMORY_ORDER.counted(number), number.shape), number)
