"""From what a model is called to the files of its export."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

import torch

from unishard.checkpoint.lazy_shards import LazyShard
from unishard.errors import CheckpointError
from unishard.export.assets import Assets, TensorSlice
from unishard.export.plan import ExportedTensor, File, bytes_of, index_of, plan

__all__ = ["Layout", "lay_out"]


class Layout(NamedTuple):
    """A folder before it is written."""

    files: list[File]
    """Of tensors."""
    others: dict[str, bytes]
    """Beside them, by name."""
    dtype: torch.dtype
    """Of the floating tensors."""

    @property
    def bare(self) -> bool:
        """Whether there are tensors alone, which no library can load by itself."""
        return not any(PurePosixPath(name).name in ("config.json", "adapter_config.json") for name in self.others)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(file.size - len(file.header) for file in self.files)

    @property
    def digest(self) -> str:
        """The same for the same files of tensors."""
        return hashlib.sha256(b"".join(file.name.encode() + file.header for file in self.files)).hexdigest()


def lay_out(assets: Assets, stretches: Mapping[str, LazyShard], dtype: str | None, max_shard_size: int | str) -> Layout:
    """Plan the files of an export.

    Args:
        assets: Of the model.
        stretches: Its tensors, of which shapes and dtypes alone are looked at.
        dtype: Word of the config, or None for what the model's config names.
        max_shard_size: Such as `5GB`. Adapters are in one file, since PEFT reads no others.

    Raises:
        CheckpointError: The model cannot be exported, a tensor is missing or empty, or an argument is wrong.
    """
    if assets.refusal:
        raise CheckpointError(assets.refusal)
    target, most = assets.dtype_of(dtype), bytes_of(max_shard_size)
    files: list[File] = []
    others = assets.files_in(target)
    for stem, names in assets.names.items():
        if not names:
            raise CheckpointError(f"there is nothing to export as {stem}: the model has no such tensors")
        entries = [_entry(name, source, assets.pieces.get(name), stretches, target) for name, source in names.items()]
        planned = plan(entries, stem, None if assets.kind == "adapter" else most)
        if len(planned) > 1:
            others[f"{stem}.safetensors.index.json"] = index_of(planned)
        files += planned
    if assets.kind == "adapter":
        _refuse_empty(files)
    return Layout(files, others, target)


def _entry(name: str, source: str, piece: TensorSlice | None, stretches: Mapping[str, LazyShard], target: torch.dtype) -> ExportedTensor:
    try:
        stretch = stretches[source]
    except KeyError:
        raise CheckpointError(f"{source} is to be exported and is not among the {len(stretches)} tensors that are there") from None
    start, shape = (piece.start, tuple(piece.shape)) if piece else (0, tuple(stretch.shape))
    if not 0 <= start <= start + math.prod(shape) <= stretch.shape.numel():
        raise CheckpointError(f"{name} is to be a piece of {source} that lies outside it; the names of the export are damaged")
    return ExportedTensor(name, source, shape, target if stretch.dtype.is_floating_point else stretch.dtype, start)


def _refuse_empty(files: list[File]) -> None:
    for place in (place for file in files for place in file.places):
        if 0 in place.entry.shape:
            raise CheckpointError(f"{place.entry.source} has no elements ({place.entry.shape}); an adapter with it could not be loaded")
