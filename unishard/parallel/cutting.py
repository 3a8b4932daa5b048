"""Makes a slice of a parameter, before the engine shards it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from unishard.contract.kit.materialization import Reader, set_full, set_reader, take_full, take_reader
from unishard.distributed.boxes import inside, span
from unishard.distributed.slice_order import SliceOrder
from unishard.distributed.slices import Slice, mark


def cut(parameter: nn.Parameter, part: Slice) -> Callable[[], None]:
    """Make a slice of a parameter, which stays the same object; returns what undoes it."""
    full, reader = parameter.data, take_reader(parameter)
    parameter.data = part.cut(full).contiguous()
    mark(parameter, part)
    if reader is None:
        set_full(parameter, full)
    else:
        before = part.number * parameter.numel()
        set_reader(parameter, lambda begin, end: _read(reader, full.shape, part.order, before + begin, before + end))

    def undo() -> None:
        take_reader(parameter)
        take_full(parameter)
        mark(parameter, None)
        parameter.data = full
        if reader is not None:
            set_reader(parameter, reader)

    return undo


def _read(reader: Reader, shape: Sequence[int], order: SliceOrder, begin: int, end: int) -> Tensor:
    """Elements of a full tensor between two, in slice order: of columns, the rows are read."""
    parts = []
    for held in order.boxes(shape, begin, end):
        around = order.around(shape, held.box)
        first, last = span(shape, around)
        parts.append(inside(reader(first, last + 1), around, held.box).reshape(-1))
    return torch.cat(parts)
