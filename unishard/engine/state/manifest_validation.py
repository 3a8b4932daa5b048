"""Checks that what a manifest says fits together, before a run is changed: a file may be edited, and its checksum
removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unishard.checkpoint.manifest import FILE, Manifest
from unishard.data import position
from unishard.engine.optim.torch_schedule import alike
from unishard.errors import CheckpointError

_RESUMED = ("lr", "momentum", "betas")
"""The options of a parameter group that a schedule continues with."""


def require_sense(manifest: Manifest, positions: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check the manifest's data positions and options of the optimizer.

    Args:
        manifest: The manifest.
        positions: Its `data`, decoded.
        groups: The optimizer's parameter groups of this run; empty for inference.

    Raises:
        CheckpointError: The run could not resume from one of them; names the field.
    """
    wrong = next(_wrong(manifest, positions, groups), None)
    if wrong is not None:
        raise CheckpointError(
            f"{FILE}: {wrong}, which no run saves; the file is damaged or was edited, use another checkpoint"
        )


def _wrong(manifest: Manifest, positions: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if positions and len(positions) != manifest.world_size:
        yield f"data has {len(positions)} entries for {manifest.world_size} ranks"
    for index, saved_position in enumerate(positions):
        if not position.is_position(saved_position):
            yield f"data.{index} is {saved_position!r:.60}"
    saved = manifest.optimizer.groups if manifest.optimizer else []
    for index, (then, now) in enumerate(zip(saved, groups, strict=False)):
        for name in _RESUMED:
            option = then.options.get(name)
            if not alike(option, now.get(name)):
                yield f"optimizer.groups.{index}.options.{name} is {option!r:.60}"
