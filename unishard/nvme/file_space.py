"""One flat space for all that an optimizer steps in one dtype, and a region of a file for each key of its state.

A piece is an interval of the space, whatever tensors it cuts, so all pieces have one size, on every engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unishard.contract.footprint import PIECE
from unishard.nvme.rank_file import ALIGNED, RankFile
from unishard.nvme.streams import OVERLAP, Streams

_CUT_AT = 256
"""Elements: a tensor is cut at a multiple of its own, where a vector of the CPU ends and a block of 8-bit moments, so
that no element is computed in another way than in the whole tensor.
"""


class Cut(NamedTuple):
    """The part of a stepped tensor that lies in a piece."""

    tensor: Tensor
    start: int
    """Its first element in the tensor."""
    stop: int
    at: int
    """Its first element in the piece."""


class FileSpace:
    """Where the state of stepped tensors lies."""

    def __init__(self, tensors: Sequence[Tensor], keys: Mapping[str, torch.dtype]) -> None:
        """Lay the tensors out.

        Args:
            tensors: All that is stepped in one dtype.
            keys: Those of the state that have the shape of what is stepped, with their dtypes.
        """
        self._starts: dict[Tensor, int] = {}
        self._keys = keys
        at = 0
        for tensor in tensors:
            self._starts[tensor] = at
            at += -(-max(tensor.numel(), 1) // _CUT_AT) * _CUT_AT
        self._piece = min(PIECE, -(-max(at, 1) // ALIGNED) * ALIGNED)
        self._numel = -(-max(at, 1) // self._piece) * self._piece + OVERLAP
        self.nbytes = sum(self._numel * dtype.itemsize for dtype in keys.values())
        """Of its regions."""
        self._mapped: dict[str, Tensor] = {}

    def put_into(self, file: RankFile, start: int) -> Streams:
        """Take the bytes of a file from one on, and return what moves pieces of them."""
        starts: dict[str, int] = {}
        for key, dtype in self._keys.items():
            starts[key] = start
            self._mapped[key] = file.tensor(start, self._numel, dtype)
            start += self._numel * dtype.itemsize
        return Streams(file, starts, self._keys, self._piece)

    def __contains__(self, tensor: Tensor) -> bool:
        return self._place(tensor) is not None

    def state(self, key: str, tensor: Tensor) -> Tensor:
        """The memory of a key of the state of a stepped tensor, or of a part of one, in the shape of it."""
        start = self._start(tensor)
        return self._mapped[key][start : start + tensor.numel()].view(tensor.shape)

    def holds(self, key: str, tensor: Tensor, value: Tensor) -> bool:
        """Whether a value of the state of a stepped tensor lies in its place here."""
        return value.data_ptr() == self.state(key, tensor).data_ptr()

    def cuts(self, tensors: Sequence[Tensor]) -> dict[int, list[Cut]]:
        """The parts of these tensors by the number of the piece that they lie in, in the order of pieces."""
        found: dict[int, list[Cut]] = {}
        for tensor in tensors:
            first, numel = self._start(tensor), tensor.numel()
            start, number = 0, first // self._piece
            while start < max(numel, 1):
                stop = -(-((number + 1) * self._piece - first) // _CUT_AT) * _CUT_AT
                cut = Cut(tensor, start, min(stop, numel), first + start - number * self._piece)
                found.setdefault(number, []).append(cut)
                start, number = stop, number + 1
        return dict(sorted(found.items()))

    def _start(self, tensor: Tensor) -> int:
        place = self._place(tensor)
        assert place is not None
        return place

    def _place(self, tensor: Tensor) -> int | None:
        """Where a tensor begins; one that is a view of a part of another begins there."""
        if tensor in self._starts:
            return self._starts[tensor]
        for whole, start in self._starts.items():
            inside = tensor.data_ptr() - whole.data_ptr()
            if tensor.dtype == whole.dtype and 0 <= inside < whole.nbytes:
                return start + inside // tensor.itemsize
        return None
