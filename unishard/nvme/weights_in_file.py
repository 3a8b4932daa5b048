"""Weights in a file: mapped, so that the kernel reads what an engine gathers, and writes what an update changes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unishard.nvme.rank_file import ALIGNED, RankFile


class WeightsInFile:
    """Host memory that is replaced by a region of a file."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Find the memory; nothing is changed.

        Args:
            tensors: All through which an engine reads and writes its weights. Several may share memory.
        """
        self._by_memory: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.numel():
                self._by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)

    @property
    def nbytes(self) -> int:
        """Of the weights in the file."""
        return sum(_aligned(tensors[0].untyped_storage().nbytes()) for tensors in self._by_memory.values())

    @torch.no_grad()
    def put_into(self, file: RankFile, start: int) -> None:
        """Copy the weights into a file, from a byte on, and let the tensors be there."""
        for tensors in self._by_memory.values():
            old = tensors[0].untyped_storage()
            new = file.tensor(start, old.nbytes(), torch.uint8)
            new.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
            for tensor in tensors:
                first = start // tensor.itemsize + tensor.storage_offset()
                own = torch.empty(0, dtype=tensor.dtype)
                tensor.data = own.set_(new.untyped_storage(), first, tensor.shape, tensor.stride())
            start += _aligned(old.nbytes())
        self._by_memory.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
