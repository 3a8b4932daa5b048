"""Plans the offset of each tensor in the safetensors files.

Depends only on names, shapes and dtypes, so the bytes are reproducible.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from unishard.errors import CheckpointError

_WORDS: Mapping[torch.dtype, str] = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which safetensors 0.8 writes them, so that every tensor is aligned to the size of its elements."""
_ORDER = {word: place for place, word in enumerate(_WORDS.values())}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class ExportedTensor(NamedTuple):
    """A tensor to export."""

    name: str
    """Its name in the file."""
    source: str
    """The name of the model's tensor."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Its dtype in the file."""
    start: int = 0
    """First element in the model's flattened tensor, which may hold several exported ones."""
    parts: tuple[ExportedTensor, ...] = ()
    """What it consists of, one behind the other, where it is several of the model's tensors."""


class FilePlace(NamedTuple):
    """The place of a tensor, or of a part of one, in its file."""

    entry: ExportedTensor
    at: int
    """Offset of the first byte."""


class File(NamedTuple):
    """One safetensors file."""

    name: str
    header: bytes
    places: tuple[FilePlace, ...]
    size: int


def bytes_of(size: int | str) -> int:
    """Parse a size as transformers writes it: a number of bytes, or "5GB", in powers of ten.

    Raises:
        CheckpointError: The size is invalid.
    """
    text = str(size).strip().upper()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        count = float(text.removesuffix(unit)) if unit else int(text)
        wanted = int(count * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        wanted = 0
    if wanted < 1:
        raise CheckpointError(
            f"max_shard_size: invalid size {size!r}; expected bytes, or a number with {', '.join(_UNITS)}, such as 5GB"
        )
    return wanted


def plan(entries: Iterable[ExportedTensor], stem: str, max_bytes: int | None) -> list[File]:
    """Distribute tensors over files, in natural order of their names.

    Args:
        entries: In any order.
        stem: File name without suffix, such as `model`.
        max_bytes: Maximum bytes of tensors in a file, unless a single tensor is larger; None for one file.

    Raises:
        CheckpointError: A tensor has a dtype that safetensors does not support.
    """
    groups: list[list[ExportedTensor]] = [[]]
    filled = 0
    for entry in sorted(entries, key=lambda tensor: _natural(tensor.name)):
        size = _bytes(entry)
        if groups[-1] and max_bytes is not None and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += size
    count = len(groups)
    suffixes = [""] if count == 1 else [f"-{number:05d}-of-{count:05d}" for number in range(1, count + 1)]
    return [_file(f"{stem}{suffix}.safetensors", group) for suffix, group in zip(suffixes, groups, strict=True)]


def index_of(files: Sequence[File]) -> bytes:
    """The JSON index that maps tensors to files."""
    total = sum(_bytes(place.entry) for file in files for place in file.places)
    names = {place.entry.name: file.name for file in files for place in file.places}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True) + "\n"
    ).encode()


def _file(name: str, group: Sequence[ExportedTensor]) -> File:
    ordered = sorted(
        group, key=lambda tensor: (_ORDER[_word(tensor)], tensor.name)
    )  # as safetensors does, whatever the order of layers
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: list[tuple[ExportedTensor, int]] = []
    end = 0
    for entry in ordered:
        start = end
        for part in entry.parts or (entry,):
            starts.append((part, end))
            end += _bytes(part)
        table[entry.name] = {"dtype": _word(entry), "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    places = tuple(FilePlace(part, len(header) + start) for part, start in starts)
    return File(name, header, places, len(header) + end)


def _word(entry: ExportedTensor) -> str:
    try:
        return _WORDS[entry.dtype]
    except KeyError:
        raise CheckpointError(
            f"{entry.source} is {entry.dtype}, which unishard cannot write to safetensors; convert it before saving"
        ) from None


def _bytes(entry: ExportedTensor) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key for natural order: layer 2 before layer 10."""
    return [
        (0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in re.split(r"(\d+)", name)
    ]
