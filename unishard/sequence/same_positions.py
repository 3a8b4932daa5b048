"""Compares what forwards over some positions, and over those among others, made of the same positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.distributed.nested_tensors import tensors_in

Room = Mapping[torch.dtype, float]
OTHER_SHAPES: Room = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the largest element: what products in other shapes round, with much room; a position counted anew changes more."""
SAME_SHAPES: Room = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.005, torch.float16: 1e-3}
"""What products in the same shapes may round, where experts get a token at another place."""
_ROUTED = {torch.float64: 0.0, torch.float32: 1 / 128}
"""Positions that may differ, where another rounding sends a token to other experts."""
_ROUTED_LOW = 1 / 8
"""The same in 16 bits. A convolution over three positions changes twice as many of the first eight."""
_SPAN = 8
_OF_ROWS = 2
"""Dimensions of `[rows, positions]`."""


class PartOfAll(NamedTuple):
    """What a rank has of the positions."""

    rank: int
    size: int
    length: int
    """How many."""


class Compared(NamedTuple):
    """What forwards made of this rank's positions, a tensor after the other: `[rows, positions, ...]`.

    What has no positions, such as a loss, is as it is.
    """

    part: list[Tensor]
    whole: list[Tensor]
    other: list[Tensor]
    moved: list[Tensor]
    closely: bool
    """Whether a few positions at the borders of parts count."""

    @property
    def undisturbed(self) -> bool:
        """Whether other tokens elsewhere change nothing here; of a loss they may."""
        return self.resembles(self.other, SAME_SHAPES, least=_OF_ROWS)

    @property
    def movable(self) -> bool:
        """Whether it is the same where its positions are at another place."""
        return self.resembles(self.moved, SAME_SHAPES, least=_OF_ROWS)

    @property
    def alone(self) -> bool:
        """Whether each position is by itself, wherever it is."""
        return self.undisturbed and self.movable and self.resembles(self.part, OTHER_SHAPES)

    @property
    def nearly_alone(self) -> bool:
        """The same, with the room of products in other shapes."""
        runs = (self.other, self.moved)
        return all(self.resembles(each, OTHER_SHAPES, least=_OF_ROWS) for each in runs) and self.resembles(
            self.part, OTHER_SHAPES
        )

    def resembles(self, others: list[Tensor], room: Room, least: int = 0) -> bool:
        """Whether what was made of all positions is the same in another forward; of so many dimensions at least."""
        pairs = list(zip(self.whole, others, strict=False))
        return len(self.whole) == len(others) and all(
            _same(*pair, room, closely=self.closely) for pair in pairs if pair[0].dim() >= least
        )


def cut(part: Any, of_all: Iterable[Any], share: PartOfAll, *, closely: bool) -> Compared:
    """Cut what forwards made to this rank's positions.

    Args:
        part: Made of this rank's positions.
        of_all: Made of all, once more with other tokens elsewhere, and once more with each part where the next one was.
        share: What this rank has.
        closely: As of `Compared`.
    """
    parts, own = [*tensors_in(part)], [*tensors_in(part)]
    places = (share.rank, share.rank, (share.rank + 1) % share.size)
    cuts: list[list[Tensor]] = []
    for made, place in zip(of_all, places, strict=True):
        wholes = [*tensors_in(made)]
        if len(wholes) == len(parts):
            dims = [dimension(*pair, share) for pair in zip(wholes, parts, strict=True)]
            own = [_rows(each, dim, share._replace(size=1), 0) for each, dim in zip(parts, dims, strict=True)]
            wholes = [_rows(each, dim, share, place) for each, dim in zip(wholes, dims, strict=True)]
        cuts.append(wholes)
    whole, other, moved = cuts
    return Compared(own, whole, other, moved, closely)


def dimension(whole: Tensor, part: Tensor, share: PartOfAll) -> int | None:
    """The dimension of the positions."""
    if whole.dim() != part.dim() or not part.numel() or whole.numel() != share.size * part.numel():
        return None
    return next((dim for dim in range(part.dim()) if whole.shape[dim] == share.size * part.shape[dim]), None)


def _rows(tensor: Tensor, dim: int | None, share: PartOfAll, place: int) -> Tensor:
    if dim is None:
        return tensor
    if dim:
        return tensor.movedim(dim, 1).chunk(share.size, 1)[place].clone()
    length = tensor.shape[0] // share.size
    count = share.length if length % share.length == 0 else length
    return tensor.reshape(-1, share.size, count, *tensor.shape[1:])[:, place].clone()


def _same(first: Tensor, second: Tensor, room: Room, *, closely: bool) -> bool:
    """Whether two tensors are the same, but for what is rounded.

    At the beginning and at the end, where modules that look a little further see another part, as many positions may
    differ as anywhere.
    """
    if first.shape != second.shape:
        return False
    if not first.numel():
        return True
    if first.is_floating_point():
        atol = room.get(first.dtype, room[torch.bfloat16]) * float(first.nan_to_num(0, 0, 0).abs().max())
        differs = ~torch.isclose(first.float(), second.float(), rtol=0, atol=atol, equal_nan=True)
    else:
        differs = first != second
    if not bool(differs.any()):
        return True
    if first.dim() < _OF_ROWS:
        return False
    positions = differs.flatten(2).any(-1) if differs.dim() > _OF_ROWS else differs
    if not closely:
        return float(positions.float().mean()) <= _ROUTED_LOW
    return all(_few(positions[:, span], first.dtype) for span in _spans(positions.shape[1]))


def _spans(length: int) -> list[slice]:
    """Of the first and the last positions, each twice as long as the one before."""
    lengths = [_SPAN << turn for turn in range((length // _SPAN).bit_length()) if _SPAN << turn < length]
    return [slice(length), *map(slice, lengths), *(slice(-each, None) for each in lengths)]


def _few(differs: Tensor, dtype: torch.dtype) -> bool:
    return float(differs.float().mean()) <= _ROUTED.get(dtype, _ROUTED_LOW)
