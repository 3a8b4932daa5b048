"""Plans the files of an export."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import torch

from unishard.checkpoint.export.assets import Assets, TensorSlice
from unishard.checkpoint.export.plan import ExportedTensor, File, bytes_of, index_of, plan
from unishard.distributed.dtypes import name_of
from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError


class ExportContents(NamedTuple):
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


def lay_out(
    assets: Assets, shards: Mapping[str, LazyShard], dtype: str | None, max_shard_size: int | str
) -> ExportContents:
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
    kept_in_fp32 = set(assets.kept.get(name_of(target), ()))

    def dtype_of(*sources: str) -> torch.dtype:
        return torch.float32 if kept_in_fp32.intersection(sources) else target

    files: list[File] = []
    others = assets.files_in(target)
    for stem, names in assets.names.items():
        if not names:
            raise CheckpointError(f"nothing to export as {stem}: the model has no such tensors")
        entries = exported_tensors(names, assets.pieces, assets.joined, shards, dtype_of)
        planned = plan(entries, stem, None if assets.kind == "adapter" else most)
        if len(planned) > 1:
            others[f"{stem}.safetensors.index.json"] = index_of(planned)
        files += planned
    if assets.kind == "adapter":
        _refuse_empty(files)
    return ExportContents(files, others, target)


def exported_tensors(
    names: Mapping[str, str],
    pieces: Mapping[str, TensorSlice],
    joined: Mapping[str, Sequence[str]],
    tensors: Mapping[str, LazyShard],
    dtype_of: Callable[..., torch.dtype],
) -> list[ExportedTensor]:
    """Each tensor of a file, and which elements of the model's tensors it has.

    Args:
        names: By the name in the file, the name in the model.
        pieces: By the name in the file, the slice of the model's tensor, if it is not the whole.
        joined: By the name in the file, the tensors of the model, if they are several.
        tensors: Those of the model; only shapes and dtypes are used.
        dtype_of: The dtype in the file of these tensors of the model, if they are floating-point.

    Raises:
        CheckpointError: A tensor is missing, or has other elements.
    """
    return [
        _joined(name, joined[name], tensors, dtype_of(*joined[name]))
        if name in joined
        else _entry(name, source, pieces.get(name), tensors, dtype_of(source))
        for name, source in names.items()
    ]


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
    tensor = available(source, shards)
    start, shape = (piece.start, tuple(piece.shape)) if piece else (0, tuple(tensor.shape))
    if not 0 <= start <= start + math.prod(shape) <= tensor.shape.numel():
        raise CheckpointError(f"{name} is not within {source}; the checkpoint's assets/export.json is damaged")
    return ExportedTensor(name, source, shape, target if tensor.dtype.is_floating_point else tensor.dtype, start)


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
