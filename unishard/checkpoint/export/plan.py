"""Plans the offset of each tensor in the safetensors files.

Depends only on names, shapes and dtypes, so the bytes are reproducible.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import torch

from unishard.checkpoint.export.assets import Assets, TensorSlice
from unishard.distributed.dtypes import name_of
from unishard.distributed.shards import LazyShard
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
    for entry in sorted(entries, key=lambda each: _natural(each.name)):
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
        group, key=lambda each: (_ORDER[_word(each)], each.name)
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


# -- Plans the files of an export ------------------------------------------------------------------


class Layout(NamedTuple):
    """The planned contents of an export folder."""

    files: list[File]
    """The files of tensors."""
    others: dict[str, bytes]
    """All other files, by name."""
    dtype: torch.dtype
    """Dtype of the floating-point tensors."""

    @property
    def bare(self) -> bool:
        """Whether there are only tensors, which no library can load without a config."""
        return not any(PurePosixPath(name).name in ("config.json", "adapter_config.json") for name in self.others)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(file.size - len(file.header) for file in self.files)

    @property
    def digest(self) -> str:
        """A hash of the names and headers of the tensor files."""
        return hashlib.sha256(b"".join(file.name.encode() + file.header for file in self.files)).hexdigest()


def lay_out(assets: Assets, shards: Mapping[str, LazyShard], dtype: str | None, max_shard_size: int | str) -> Layout:
    """Plan the files of an export.

    Args:
        assets: The model's.
        shards: Its tensors; only shapes and dtypes are used.
        dtype: `fp32`, `bf16` or `fp16`; None for the dtype in the model's config.
        max_shard_size: Such as `5GB`. Adapters are always written to one file, since PEFT cannot read several.

    Raises:
        CheckpointError: The model cannot be exported, a tensor is missing or empty, or an argument is invalid.
    """
    if assets.refusal:
        raise CheckpointError(assets.refusal)
    target, most = assets.dtype_of(dtype), bytes_of(max_shard_size)
    kept = set(assets.kept.get(name_of(target), ()))

    def dtype_of(*sources: str) -> torch.dtype:
        return torch.float32 if kept.intersection(sources) else target

    files: list[File] = []
    others = assets.files_in(target)
    for stem, names in assets.names.items():
        if not names:
            raise CheckpointError(f"nothing to export as {stem}: the model has no such tensors")
        entries = [
            _joined(name, assets.joined[name], shards, dtype_of(*assets.joined[name]))
            if name in assets.joined
            else _entry(name, source, assets.pieces.get(name), shards, dtype_of(source))
            for name, source in names.items()
        ]
        planned = plan(entries, stem, None if assets.kind == "adapter" else most)
        if len(planned) > 1:
            others[f"{stem}.safetensors.index.json"] = index_of(planned)
        files += planned
    if assets.kind == "adapter":
        _refuse_empty(files)
    return Layout(files, others, target)


def available(source: str, shards: Mapping[str, LazyShard]) -> LazyShard:
    """A tensor of the model.

    Raises:
        CheckpointError: It is not among those that the caller has.
    """
    try:
        return shards[source]
    except KeyError:
        raise CheckpointError(
            f"{source} cannot be exported: it is not among the {len(shards)} available tensors"
        ) from None


def _entry(
    name: str, source: str, piece: TensorSlice | None, shards: Mapping[str, LazyShard], target: torch.dtype
) -> ExportedTensor:
    stretch = available(source, shards)
    start, shape = (piece.start, tuple(piece.shape)) if piece else (0, tuple(stretch.shape))
    if not 0 <= start <= start + math.prod(shape) <= stretch.shape.numel():
        raise CheckpointError(f"{name} is not within {source}; the checkpoint's assets/export.json is damaged")
    return ExportedTensor(name, source, shape, target if stretch.dtype.is_floating_point else stretch.dtype, start)


def _joined(name: str, sources: Sequence[str], shards: Mapping[str, LazyShard], target: torch.dtype) -> ExportedTensor:
    parts = tuple(_entry(name, source, None, shards, target) for source in sources)
    if len({(part.shape[1:], part.dtype) for part in parts}) != 1 or not parts[0].shape:
        raise CheckpointError(
            f"the parts of {name} do not fit together; the checkpoint's assets/export.json is damaged"
        )
    rows = sum(part.shape[0] for part in parts)
    return parts[0]._replace(shape=(rows, *parts[0].shape[1:]), parts=parts)


def _refuse_empty(files: list[File]) -> None:
    for place in (place for file in files for place in file.places):
        if 0 in place.entry.shape:
            raise CheckpointError(
                f"{place.entry.source} is empty ({place.entry.shape}); an adapter with it could not be loaded"
            )
