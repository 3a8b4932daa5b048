"""Stretches of a flattened tensor as boxes, and boxes as runs of memory."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unishard.distributed.boxes import boxes, runs

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_hold_the_elements_of_the_stretch_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(start, whole.numel()))
    found = list(boxes(shape, start, end))
    inside = [whole[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))].reshape(-1) for box in found]
    assert [int(each) for piece in inside for each in piece] == list(range(start, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_runs_say_where_a_box_lies_in_the_flattened_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
    filled: dict[int, int] = {}
    for begin, inside, length in runs(shape, offsets, sizes):
        filled |= {inside + at: begin + at for at in range(length)}
    assert [filled[at] for at in range(len(box))] == box


def test_an_empty_box_has_no_runs() -> None:
    assert not list(runs((3, 4), (0, 0), (0, 4)))
