"""A tensor in a file, as torch.save writes it and torch.load reads it, without a copy of its data in memory.

What torch.save puts around the data depends on shape and dtype alone, once its checksum of the data is switched off, which torch.load does
not look at (torch 2.13). So the envelope is made once for each of them, and the data goes to the file from where it lies.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["pieces_of"]


def pieces_of(values: Tensor) -> tuple[bytes, memoryview, bytes]:
    """What makes up the record of a tensor, to be written one after the other.

    Args:
        values: Contiguous, in host memory; the second piece is its memory.
    """
    before, after = _envelope(values.dtype, values.shape)
    return before, values.reshape(-1).view(torch.uint8).numpy().data, after


@lru_cache(maxsize=4096)
def _envelope(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    buffer, example = io.BytesIO(), torch.zeros(shape, dtype=dtype)
    checks = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(example, buffer)
    finally:
        torch.serialization.set_crc32_options(checks)
    record = buffer.getvalue()
    reader: Any = torch._C.PyTorchFileReader(io.BytesIO(record))
    begin = reader.get_record_offset("data/0")  # as torch's notes on serialization find it
    return record[:begin], record[begin + example.nbytes :]
