"""What torch.save puts around the data of a tensor, so that the data can go to a file from where it lies and torch.load reads it.

It depends on shape and dtype alone, once its checksum of the data is switched off, which torch.load does not look at (torch 2.13). So it
is made once for each of them.
"""

from __future__ import annotations

import io
import struct
import zipfile
from functools import lru_cache

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
    begin = _offset_of_data(record)
    return record[:begin], record[begin + example.nbytes :]


def _offset_of_data(record: bytes) -> int:
    """Where the data begins: a record is a zip file that compresses nothing, and the local header of `data/0` stands before its data."""
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        (header,) = (entry.header_offset for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name, extra = struct.unpack_from("<HH", record, header + 26)  # lengths of what follows the 30 bytes of the header
    return int(header + 30 + name + extra)
