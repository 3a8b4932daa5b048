"""The bytes that torch.save writes around a tensor's data, so that the data can be written without a copy and
torch.load reads it.

They depend only on shape and dtype, once the data checksum is disabled, which torch.load ignores (torch 2.13). So they
are cached.
"""

from __future__ import annotations

import io
import struct
import zipfile
from functools import lru_cache

import torch
from torch import Tensor


def envelope_of(values: Tensor) -> tuple[bytes, bytes]:
    """The bytes before and after the data of a tensor in its record."""
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
    """Where the data begins: a record is an uncompressed zip file, and the local header of `data/0` precedes its
    data.
    """
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        (header,) = (entry.header_offset for entry in archive.infolist() if entry.filename.endswith("/data/0"))
    name, extra = struct.unpack_from("<HH", record, header + 26)  # lengths of what follows the 30 bytes of the header
    return int(header + 30 + name + extra)
