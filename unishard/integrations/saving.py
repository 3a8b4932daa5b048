"""Checkpoints in folders that a framework names: each holds one, and the options of the optimizer come back from it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unishard.checkpoint import finding, manifest
from unishard.distributed import process_group
from unishard.distributed.on_ranks import on_all
from unishard.engine.engine import Engine
from unishard.errors import ConfigError, Problem

__all__ = ["refuse_copies", "replace_checkpoint", "restore_options", "set_options"]

_KERNELS = ("foreign", "fused")
"""Options that say how an update is computed, which each engine chooses."""


def refuse_copies(copy_to: str | None) -> None:
    """Check that nothing is to be copied of `checkpoint.dir`, where a framework does not save.

    Raises:
        ConfigError: It is.
    """
    if copy_to is not None:
        problem = (
            "copies what engine.save writes in checkpoint.dir, and the framework saves in directories of its own; "
            "remove it, and copy these"
        )
        raise ConfigError([Problem("checkpoint.copy_to", problem)])


def replace_checkpoint(engine: Engine, folder: str | Path, state: Any = None) -> None:
    """Save in a directory in place of the checkpoints there, where another engine may save next. Collective.

    Args:
        engine: What to save.
        folder: The directory; its other checkpoints are removed once the new one is complete.
        state: As in `Engine.save`.

    Raises:
        CheckpointError: As in `Engine.save`.
    """
    before = finding.checkpoints(Path(folder))
    made = engine.save(folder, state=state)
    for checkpoint in before:
        engine.wait()
        if engine.is_main and checkpoint.path.name != made.name:
            shutil.rmtree(checkpoint.path)
    engine.framework.leave(folder)


def restore_options(engine: Engine, folder: str | Path) -> None:
    """Give the optimizer's groups the options that a checkpoint has, as frameworks do: schedules and scripts change
    more than rates. Collective.

    Raises:
        CheckpointError: On every rank: it cannot be read.
    """
    # On all, since rank 0 may remove the folder once it has read it.
    facts = on_all(process_group.host_group(), lambda: manifest.read(finding.locate(Path(folder), "latest")).optimizer)
    groups = engine.optimizer.param_groups
    if facts is not None and len(facts.groups) == len(groups):
        for group, then in zip(groups, facts.groups, strict=True):
            set_options(group, then.options)


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Give a group of an optimizer options of another run."""
    for name, value in options.items():
        if name not in _KERNELS:
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
