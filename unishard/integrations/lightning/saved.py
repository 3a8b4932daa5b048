"""Checkpoints: those of `Engine.save`, which any engine reads, with what Lightning saves as their user state."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unishard.checkpoint import finding, manifest, tensor_names
from unishard.checkpoint.manifest import Manifest
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.user_state import unpack
from unishard.checkpoint.verifying import opened
from unishard.engine.engine import Engine
from unishard.errors import CheckpointError
from unishard.integrations.saving import replace_checkpoint, set_options

__all__ = ["load", "options_of", "read", "restore_options", "save", "weights_of"]

_STATE = "lightning"


def save(engine: Engine, path: str | Path, data: Mapping[str, Any]) -> None:
    """Make a directory hold this checkpoint alone. Collective.

    Raises:
        CheckpointError: The path is not on a file system, or as in `Engine.save`.
    """
    if "://" in str(path):
        raise CheckpointError(f"{path}: checkpoints are directories of a file system that all ranks share")
    file = io.BytesIO()
    torch.save(data, file)
    replace_checkpoint(engine, path, {_STATE: file.getvalue()})


def load(engine: Engine, path: str | Path, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load model and optimizer, and return what Lightning saved. Collective.

    Raises:
        CheckpointError: Lightning has not saved it, or as in `Engine.load`.
    """
    resumed = engine.load(path, strict=strict, data=False)
    return _data(None if resumed is None else resumed.state, path, weights_only)


def read(path: str | Path, *, weights_only: bool | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, and what Lightning saved, without an engine."""
    facts, tensors = _opened(path)
    return _weights(facts, tensors), _data(unpack(facts.state, tensors.full), path, weights_only)


def weights_of(path: str | Path) -> dict[str, Tensor]:
    """The full weights and buffers of a checkpoint, for `module.load_state_dict`. Not collective.

    Args:
        path: The directory that `ModelCheckpoint`, `trainer.save_checkpoint` or `fabric.save` has written.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    return _weights(*_opened(path))


def options_of(engine: Engine) -> dict[str, Any]:
    """What Lightning saves of an optimizer: the options of its groups; the engine saves the rest."""
    groups = engine.optimizer.param_groups
    return {"state": {}, "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups]}


def restore_options(engine: Engine, state: Mapping[str, Any]) -> None:
    """Give the groups their saved options: schedules of torch expect the learning rates there.

    Raises:
        CheckpointError: They come from another optimizer, with its state.
    """
    if state["state"]:
        raise CheckpointError(
            "this is a file of Lightning's own, whose optimizer's state engines cannot read; load only its weights: "
            "module.load_state_dict(torch.load(path)['state_dict']) before fit, or fabric.load_raw(path, model)"
        )
    for group, options in zip(engine.optimizer.param_groups, state["param_groups"], strict=True):
        set_options(group, options)


def _opened(path: str | Path) -> tuple[Manifest, Tensors]:
    folder = finding.locate(Path(path), "latest")
    facts = manifest.read(folder)
    return facts, opened(folder, facts)


def _weights(facts: Manifest, tensors: Tensors) -> dict[str, Tensor]:
    weights = {name: tensors.full(key) for key in facts.tensors if (name := tensor_names.parameter_of(key)) is not None}
    return weights | {name: weights[first] for name, first in facts.ties.items()}


def _data(state: Any, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    if not isinstance(state, dict) or _STATE not in state:
        raise CheckpointError(
            f"{path}: engine.save has written this checkpoint, without Lightning's loops; read its weights with "
            "unishard.integrations.lightning.weights_of(path) before fit"
        )
    return torch.load(io.BytesIO(state[_STATE]), map_location="cpu", weights_only=weights_only)  # type: ignore[no-any-return]
