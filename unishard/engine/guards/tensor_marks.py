"""What shows that a tensor was written, read so that no kind of tensor is an error."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""
_VERSION = attrgetter("_version")


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was written in place; tensors that were made in inference mode do not count it."""
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def memory_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, the same object while it has that; None inside transforms of `torch.func`, whose tensors
    show none.
    """
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


@torch.no_grad()
def sum_of_bits(parameter: Any) -> Tensor | None:
    """Of this rank's shard, on the device: exact, whatever the values; None if it has no elements in memory, and inside
    transforms of `torch.func`.
    """
    local: Tensor = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
    memory = memory_of(local)
    if not local.numel() or memory is None or not memory.size():
        return None
    local = torch.view_as_real(local) if local.is_complex() else local
    bits = local.view(_INTEGERS[local.itemsize])
    # It may wrap; in a wider dtype torch would copy all of it on the CPU.
    total = bits.sum(dtype=bits.dtype)
    return None if memory_of(total) is None else total


class Mark(NamedTuple):
    """What a tensor is at one time; None where that is not compared."""

    tensor: Tensor
    memory: torch.UntypedStorage | None = None
    bits: Tensor | None = None


def mark(tensor: Tensor, *, memory: bool) -> Mark:
    """Look at a tensor."""
    return Mark(tensor, memory_of(tensor) if memory else None, sum_of_bits(tensor))
