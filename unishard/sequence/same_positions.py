"""Compares what forwards over some positions, and over those among others, made of the same positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Room = Mapping[torch.dtype, float]
OTHER_SHAPES: Room = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the largest element: what products in other shapes round, with much room; a position counted anew changes more."""
SAME_SHAPES: Room = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
"""What experts round that get another number of tokens; all else is equal bit for bit."""
_ROUTED = 1 / 8
"""Positions that another rounding may send to other experts, in 16 bits."""
OF_ROWS = 2
"""Dimensions of `[rows, positions]`."""


class PartOfAll(NamedTuple):
    """What a rank has of the positions."""

    rank: int
    size: int
    length: int
    """How many."""

    @property
    def next_rank(self) -> int:
        """Where the positions are after they were moved by a part."""
        return (self.rank + 1) % self.size


def dimension(whole: Tensor, part: Tensor, share: PartOfAll) -> int | None:
    """The dimension of the positions."""
    if whole.dim() != part.dim() or not part.numel() or whole.numel() != share.size * part.numel():
        return None
    return next((dim for dim in range(part.dim()) if whole.shape[dim] == share.size * part.shape[dim]), None)


def rows(tensor: Tensor, dim: int, share: PartOfAll, place: int) -> Tensor:
    """A view of the positions of a part, `[rows, positions, ...]`."""
    if dim:
        return tensor.movedim(dim, 1).chunk(share.size, 1)[place]
    length = tensor.shape[0] // share.size
    count = share.length if length % share.length == 0 else length
    return tensor.view(-1, share.size, count, *tensor.shape[1:])[:, place]


def own(whole: Tensor, part: Tensor, share: PartOfAll, place: int) -> tuple[Tensor, Tensor]:
    """What was made of a part's positions, among all and of the part only; all of it, where it has no positions."""
    dim = dimension(whole, part, share)
    if dim is None:
        return whole, part
    return rows(whole.contiguous(), dim, share, place), rows(part.contiguous(), dim, share._replace(size=1), 0)


def same(first: Tensor, second: Tensor, room: Room, low: torch.dtype | None = None) -> bool:
    """Whether two tensors are the same, but for what is rounded.

    Args:
        first: A tensor.
        second: Another one.
        room: What may be rounded.
        low: The dtype that rounds most in the model; None for that of the tensor.
    """
    if first.shape != second.shape:
        return False
    if not first.numel() or torch.equal(first, second):
        return True
    low = low or first.dtype
    routed = _ROUTED if room is OTHER_SHAPES and low.itemsize <= torch.half.itemsize else 0
    if first.is_floating_point():
        atol = room.get(low, room[torch.bfloat16]) * float(first.nan_to_num(0, 0, 0).abs().max())
        differs = ~torch.isclose(first.float(), second.float(), rtol=0, atol=atol, equal_nan=True)
    else:
        differs = first != second
    if first.dim() < OF_ROWS:
        return not bool(differs.any())
    positions = differs.flatten(2).any(-1) if differs.dim() > OF_ROWS else differs
    return float(positions.float().mean()) <= routed
