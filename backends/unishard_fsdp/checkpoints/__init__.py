"""Checkpoint directories that FSDP scripts write and read. Importing it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unishard.contract.checkpoint_format import Advance, CheckpointFormat, Contents

__all__ = ["FORMATS"]

_INDEX = ".metadata"
_MODEL, _OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
"""Accelerate's folder names (Accelerate 1.15, utils/fsdp_utils.py)."""


def _is_dcp(source: Path) -> bool:
    return (source / _INDEX).is_file()


def _is_accelerate(source: Path) -> bool:
    return (source / _MODEL / _INDEX).is_file()


def _read_dcp(source: Path) -> Contents:
    from unishard_fsdp.checkpoints.dcp import read

    return read([source])


def _read_accelerate(source: Path) -> Contents:
    from unishard_fsdp.checkpoints.dcp import read

    contents = read([folder for folder in (source / _MODEL, source / _OPTIMIZER) if _is_dcp(folder)])
    left = sorted({path.stem.rstrip("0123456789_") for path in source.iterdir() if path.is_file()})
    return contents.leaving(f"not converted: Accelerate's other files: {', '.join(left)}") if left else contents


def _write_dcp(contents: Contents, folder: Path, advance: Advance) -> tuple[str, ...]:
    from unishard_fsdp.checkpoints.writing import write

    return write(contents, folder, advance)


FORMATS: Mapping[str, CheckpointFormat] = {
    each.name: each
    for each in (
        CheckpointFormat("dcp", "torch.distributed.checkpoint", _is_dcp, read=_read_dcp, write=_write_dcp),
        CheckpointFormat(
            "accelerate", "Accelerate (save_state of FSDP, SHARDED_STATE_DICT)", _is_accelerate, read=_read_accelerate
        ),
    )
}
"""By name."""
