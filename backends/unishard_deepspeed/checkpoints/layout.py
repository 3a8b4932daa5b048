"""Which files a DeepSpeed checkpoint consists of, by their names (DeepSpeed 0.19.8, runtime/engine.py, _get_ckpt_name)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from unishard.errors import CheckpointError

__all__ = ["Files", "files_of", "folder_of", "is_universal"]

_MODEL = "*_model_states.pt"
_OPTIMIZER = "*_optim_states.pt"
_ELSEWHERE = (
    (r"(layer_\d+_)?expert_\d+_.*|expp_rank_.*", "holds experts (MoE), which are not understood"),
    (r"layer_\d+-model.*", "is a part of a pipeline, which is not understood"),
    (r".*mp_rank_(0[1-9]|[1-9]\d).*", "is a part of a tensor or pipeline parallel model, which is not understood"),
)
"""Names of files that only other kinds of parallelism write."""


class Files(NamedTuple):
    """The files of one checkpoint, in the order of the ranks."""

    folder: Path
    model: list[Path]
    """One; at stage 3 one of each rank."""
    optimizer: list[Path]
    """One of each rank; none at stage 0."""


def is_universal(source: Path) -> bool:
    """Whether a folder is a Universal Checkpoint, or holds one."""
    return (source / "latest_universal").is_file() or (source / "zero" / "optimizer_state.pt").is_file()


def folder_of(source: Path) -> Path | None:
    """The folder with the files: the one that was given, the one that its `latest` names, or the only one in it."""
    if any(source.glob(_MODEL)):
        return source
    latest = source / "latest"
    try:
        named = source / latest.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        inside = sorted({path.parent for path in source.glob(f"*/{_MODEL}")})
        return inside[0] if len(inside) == 1 else None
    return named if any(named.glob(_MODEL)) else None


def files_of(source: Path) -> Files:
    """The files of a checkpoint.

    Raises:
        CheckpointError: There is none, files are missing, or they are of a kind that is not understood.
    """
    folder = folder_of(source)
    if folder is None:
        raise CheckpointError(f"{source}: holds no checkpoint of DeepSpeed, or several; name the folder with the files {_MODEL}")
    for path in sorted(folder.iterdir()):
        for pattern, what in _ELSEWHERE:
            if path.suffix == ".pt" and re.fullmatch(pattern, path.name):
                raise CheckpointError(f"{path}: {what}; convert a checkpoint of a model that is only data parallel")
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(f"{folder / 'offloaded_tensors'}: optimizer state in files of NVMe offload is not understood; offload to cpu")
    return Files(folder, _by_rank(folder, _MODEL), _by_rank(folder, _OPTIMIZER))


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Sorted by rank, with none missing."""
    found: dict[int, Path] = {}
    for path in folder.glob(pattern):
        rank = re.search(r"zero_pp_rank_(\d+)_", path.name)
        number = int(rank[1]) if rank else 0
        if number in found:
            raise CheckpointError(f"{path}: rank {number} has two files, {found[number].name} too; remove those of the older checkpoint")
        found[number] = path
    if sorted(found) != list(range(len(found))):
        gap = next(rank for rank in range(max(found)) if rank not in found)
        raise CheckpointError(f"{folder}: the file {pattern} of rank {gap} is missing; the checkpoint is incomplete")
    return [found[rank] for rank in sorted(found)]
