"""What torch.save puts around the data of a tensor, so that the data can go to a file from where it lies and torch.load reads it.

It depends on shape and dtype alone, once its checksum of the data is switched off, which torch.load does not look at (torch 2.13). So it
is made once for each of them.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["envelope_of"]


def envelope_of(values: Tensor) -> tuple[bytes, bytes]:
    """What stands before and after the data of a tensor in its record."""
    return _envelope(values.dtype, values.shape)


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
