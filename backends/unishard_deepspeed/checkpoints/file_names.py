"""Finds the files of a DeepSpeed checkpoint by their names (DeepSpeed 0.19.8, runtime/engine.py, _get_ckpt_name)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from unishard.checkpoint.files import read_bytes
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.errors import CheckpointError

_MODEL = "*_model_states.pt"
_OPTIMIZER = "*_optim_states.pt"
_LONGEST = 4096
"""Bytes of `latest`."""
_ELSEWHERE = (
    (r"(layer_\d+_)?expert_\d+_.*|expp_rank_.*", "experts (MoE) are not supported"),
    (r"layer_\d+-model.*", "pipeline parallel models are not supported"),
    (r".*mp_rank_(0[1-9]|[1-9]\d).*", "tensor and pipeline parallel models are not supported"),
)
"""Names of files that only other kinds of parallelism write."""


class Files(NamedTuple):
    """The files of one checkpoint, in the order of the ranks."""

    folder: Path
    model: list[Path]
    """One file; at stage 3 one for each rank."""
    optimizer: list[Path]
    """One file for each rank; none at stage 0."""


def is_universal(source: Path) -> bool:
    """Whether a folder is or contains a Universal Checkpoint."""
    return (source / "latest_universal").is_file() or (source / "zero" / "optimizer_state.pt").is_file()


def folder_of(source: Path) -> Path | None:
    """The folder with the files: the given one, the one named in its `latest`, or its only subfolder with such
    files.
    """
    if any(source.glob(_MODEL)):
        return source
    latest = source / "latest"
    try:
        named = file_inside(source, read_bytes(latest, _LONGEST).decode().strip())
    except OutsideFolderError as error:
        raise CheckpointError(f"{latest}: {error}; do not trust this checkpoint") from None
    except (OSError, UnicodeDecodeError):
        inside = sorted({path.parent for path in source.glob(f"*/{_MODEL}")})
        return inside[0] if len(inside) == 1 else None
    try:
        return named if any(named.glob(_MODEL)) else None
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(
            f"{latest}: names no folder ({error.strerror}); write the name of one, such as global_step7"
        ) from None


def files_of(source: Path) -> Files:
    """The files of a checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, files are missing, or the kind of checkpoint is not supported.
    """
    folder = folder_of(source)
    if folder is None:
        raise CheckpointError(
            f"{source}: no DeepSpeed checkpoint here, or several; give the folder with the files {_MODEL}"
        )
    for path in sorted(folder.iterdir()):
        for pattern, content in _ELSEWHERE:
            if path.suffix == ".pt" and re.fullmatch(pattern, path.name):
                raise CheckpointError(f"{path}: {content}; only checkpoints of data parallel models can be converted")
    if (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            f"{folder / 'offloaded_tensors'}: optimizer state in NVMe files is not supported; save with offload to cpu"
        )
    return Files(folder, _by_rank(folder, _MODEL), _by_rank(folder, _OPTIMIZER))


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """The files sorted by rank; checks that none is missing."""
    files: dict[int, Path] = {}
    for path in folder.glob(pattern):
        rank = re.search(r"zero_pp_rank_(\d+)_", path.name)
        number = int(rank[1]) if rank else 0
        if number in files:
            raise CheckpointError(
                f"{path}: rank {number} has a second file, {files[number].name}; remove the files of the older "
                "checkpoint"
            )
        files[number] = path
    if sorted(files) != list(range(len(files))):
        gap = next(rank for rank in range(max(files)) if rank not in files)
        raise CheckpointError(f"{folder}: the file {pattern} of rank {gap} is missing; the checkpoint is incomplete")
    return [files[rank] for rank in sorted(files)]
