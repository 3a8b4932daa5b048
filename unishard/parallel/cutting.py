"""Makes a slice of a parameter, before the engine shards it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from unishard.contract.kit.materialization import set_full, set_reader, take_full, take_reader
from unishard.distributed.slices import Slice, mark


def cut(parameter: nn.Parameter, part: Slice) -> Callable[[], None]:
    """Make a slice of a parameter, which stays the same object; returns what undoes it."""
    full, reader = parameter.data, take_reader(parameter)
    parameter.data = part.cut(full)
    mark(parameter, part)
    if reader is None:
        set_full(parameter, full)
    else:
        before = part.number * parameter.numel()
        set_reader(parameter, lambda begin, end: reader(before + begin, before + end))

    def undo() -> None:
        take_reader(parameter)
        take_full(parameter)
        mark(parameter, None)
        parameter.data = full
        if reader is not None:
            set_reader(parameter, reader)

    return undo
