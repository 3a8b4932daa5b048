"""DeepSpeed's own checkpoint directories. Importing it needs neither torch nor deepspeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unishard.contract.checkpoint_format import Advance, CheckpointFormat, Contents
from unishard_deepspeed.checkpoints.file_names import files_of, folder_of, is_universal

__all__ = ["FORMATS", "files_of"]


def _recognises(source: Path) -> bool:
    return not is_universal(source) and folder_of(source) is not None


def _read(source: Path) -> Contents:
    from unishard_deepspeed.checkpoints.reading import read

    return read(source)


def _write_universal(contents: Contents, folder: Path, advance: Advance) -> tuple[str, ...]:
    from unishard_deepspeed.checkpoints.universal import write

    return write(contents, folder, advance)


FORMATS: Mapping[str, CheckpointFormat] = {
    each.name: each
    for each in (
        CheckpointFormat("deepspeed", "DeepSpeed (engine.save_checkpoint)", _recognises, read=_read),
        CheckpointFormat("deepspeed-universal", "DeepSpeed Universal Checkpoint", is_universal, write=_write_universal),
    )
}
"""By name."""
