"""Writes a DeepSpeed Universal Checkpoint, which an engine of any stage and number of ranks loads (`checkpoint.load_universal`).

The folder is what `engine.load_checkpoint` is given: `latest_universal` names the one checkpoint in it. One file serves stages 1, 2
and 3, which look for the same facts under different names (DeepSpeed 0.19.8, checkpoint/ds_to_universal.py, runtime/base_optimizer.py and
runtime/zero/stage3.py).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unishard.checkpoint.disk import fsync
from unishard.checkpoint.formats import Advance, Contents
from unishard.checkpoint.keys import PARAMETERS, optimizer_part, parameter_of
from unishard.checkpoint.lazy_shards import LazyShard
from unishard.errors import CheckpointError

__all__ = ["write"]

_VERSION = "0.19.8"
"""Of DeepSpeed, whose form this is."""
_COUNTS_WHOLE = {"FusedAdam", "DeepSpeedCPUAdam"}
"""Optimizers of DeepSpeed that take a step count that is an int; torch's take a tensor."""


def write(contents: Contents, folder: Path, advance: Advance) -> tuple[str, ...]:
    """Fill an empty folder: one file for each tensor, of which one at a time is in memory.

    Returns:
        What is left behind, and what DeepSpeed itself does not take back.

    Raises:
        CheckpointError: A tensor has a name that is no path, or there is no optimizer.
    """
    if contents.optimizer is None or not any(map(optimizer_part, contents.stretches)):
        raise CheckpointError("the checkpoint has no optimizer state, without which DeepSpeed loads no Universal Checkpoint")
    tag = f"global_step{contents.step}_universal"
    inner = folder / tag
    steps = _parameters(contents, inner / "zero", advance)
    _save(_optimizer_state(contents, steps), inner / "zero" / "optimizer_state.pt")
    module = {name: _whole(contents.stretches[PARAMETERS + name]) for name in contents.buffers}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        _save(_model_states(contents, module), inner / name)
    latest = folder / "latest_universal"
    latest.write_text(tag, encoding="utf-8")
    fsync(latest)
    return tuple(_notes(contents))


def _parameters(contents: Contents, folder: Path, advance: Advance) -> dict[str, Any]:
    """A folder of files for each parameter; returns the step counts."""
    steps: dict[str, Any] = {}
    whole_counts = contents.optimizer is not None and contents.optimizer.class_name in _COUNTS_WHOLE
    for key, stretch in contents.stretches.items():
        name, kind = optimizer_part(key) or (parameter_of(key), "fp32")
        if name is None or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{key}: cannot be a folder of a Universal Checkpoint")
        values = _whole(stretch)
        if kind == "step":
            steps[name] = int(values) if whole_counts else values
            _save(steps[name], folder / name / "step.pt")
        else:
            _save({"param": values, "cat_dim": 0}, folder / name / f"{kind}.pt")
        advance(values.nbytes)
    return steps


def _optimizer_state(contents: Contents, steps: Mapping[str, Any]) -> dict[str, Any]:
    assert contents.optimizer is not None
    step = next(iter(steps.values()), torch.tensor(float(contents.step)))
    groups = []
    for index, group in enumerate(contents.optimizer.groups):
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in group.options.items()}
        counted = {"step": step} if contents.optimizer.class_name == "FusedAdam" else {}
        groups.append({**options, **counted, "params": [index]})
    state = {index: {"step": step} for index in range(len(groups))}
    return {
        "ds_version": _VERSION,
        "overflow": False,
        "zero_stage": 1,
        "partition_count": 1,
        "param_groups": groups,  # stages 1 and 2
        "optimizer_state_dict": {"state": state, "param_groups": groups},  # stage 3
    }


def _model_states(contents: Contents, module: Mapping[str, Tensor]) -> dict[str, Any]:
    updates = contents.step if contents.schedule is None else contents.schedule.updates
    return {
        "module": dict(module),
        "buffer_names": list(contents.buffers),
        "optimizer": None,
        "param_shapes": [
            {name: contents.stretches[PARAMETERS + name].shape for name in group.names}
            for group in (contents.optimizer.groups if contents.optimizer else ())
        ],
        "frozen_param_shapes": {name: contents.stretches[PARAMETERS + name].shape for name in contents.frozen},
        "frozen_param_fragments": None,
        "shared_params": dict(contents.ties),
        "lr_scheduler": {"last_batch_iteration": updates - 1},  # of DeepSpeed's own schedulers
        "global_steps": contents.step,
        "skipped_steps": contents.step - updates,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        "ds_config": {},
        "ds_version": _VERSION,
    }


def _notes(contents: Contents) -> list[str]:
    notes = []
    if contents.frozen or contents.buffers:
        notes.append(
            "DeepSpeed 0.19.8 loads only trainable parameters from a Universal Checkpoint: frozen ones (zero/<name>/fp32.pt) and buffers "
            "(module, in mp_rank_00_model_states.pt) are there, but your script has to load them"
        )
    if contents.optimizer is not None and len(contents.optimizer.groups) > 1:
        notes.append(
            "at stage 3 DeepSpeed 0.19.8 gives every parameter group the options of the first one, and lets them share one step count, "
            f"which then counts {len(contents.optimizer.groups)} for each update; load it at stage 1 or 2, or set both again"
        )
    kinds = {part[1] for part in map(optimizer_part, contents.stretches) if part is not None}
    if not {"exp_avg", "exp_avg_sq"} <= kinds:
        notes.append(
            "at stage 3 DeepSpeed 0.19.8 loads only the state of Adam and AdamW from a Universal Checkpoint; load it at stage 1 or 2"
        )
    if contents.loss_scale is not None:
        notes.append("the loss scale starts anew")
    notes.append("of learning-rate schedulers only DeepSpeed's own go on; pass load_lr_scheduler_states=False for another")
    return notes


def _whole(stretch: LazyShard) -> Tensor:
    return stretch.read(0, stretch.end).reshape(stretch.shape)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(value, buffer)  # in memory first, since torch's own writer gives no clean error on a full disk (torch 2.13)
    path.write_bytes(buffer.getbuffer())
    fsync(path)
