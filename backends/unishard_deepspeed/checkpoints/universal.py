"""Writes a DeepSpeed Universal Checkpoint, which an engine of any stage and number of ranks can load
(`checkpoint.load_universal`).

Pass the folder to `engine.load_checkpoint`; its file `latest_universal` names the checkpoint in it. The files suit
stages 1, 2 and 3, which read the same data under different names (DeepSpeed 0.19.8, checkpoint/ds_to_universal.py,
runtime/base_optimizer.py and runtime/zero/stage3.py).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unishard.checkpoint.disk import fsync
from unishard.checkpoint.tensor_names import PARAMETERS, optimizer_part, parameter_of
from unishard.contract.checkpoint_format import Advance, Contents
from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError

_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout this is."""
_INT_STEP = {"FusedAdam", "DeepSpeedCPUAdam"}
"""DeepSpeed's optimizers, whose step count is an int; torch's use a tensor."""


def write(contents: Contents, folder: Path, advance: Advance) -> tuple[str, ...]:
    """Fill an empty folder: one file for each tensor, with one tensor in memory at a time.

    Returns:
        Notes on what is not converted, and on what DeepSpeed itself does not load.

    Raises:
        CheckpointError: A tensor's name cannot be a path, or there is no optimizer state.
    """
    if contents.optimizer is None or not any(map(optimizer_part, contents.shards)):
        raise CheckpointError(
            "the checkpoint has no optimizer state, which DeepSpeed needs to load a Universal Checkpoint"
        )
    tag = f"global_step{contents.step}_universal"
    inner = folder / tag
    steps = _parameters(contents, inner / "zero", advance)
    _save(_optimizer_state(contents, steps), inner / "zero" / "optimizer_state.pt")
    module = {name: _full_tensor(contents.shards[PARAMETERS + name]) for name in contents.buffers}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        _save(_model_states(contents, module), inner / name)
    latest = folder / "latest_universal"
    latest.write_text(tag, encoding="utf-8")
    fsync(latest)
    return tuple(_notes(contents))


def _parameters(contents: Contents, folder: Path, advance: Advance) -> dict[str, Any]:
    """Write a folder of files for each parameter; returns the step counts."""
    steps: dict[str, Any] = {}
    int_step = contents.optimizer is not None and contents.optimizer.class_name in _INT_STEP
    for key, shard in contents.shards.items():
        name, kind = optimizer_part(key) or (parameter_of(key), "fp32")
        if name is None or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{key}: cannot be a folder name in a Universal Checkpoint")
        values = _full_tensor(shard)
        if kind == "step":
            steps[name] = int(values) if int_step else values
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
            {name: contents.shards[PARAMETERS + name].shape for name in group.names}
            for group in (contents.optimizer.groups if contents.optimizer else ())
        ],
        "frozen_param_shapes": {name: contents.shards[PARAMETERS + name].shape for name in contents.frozen},
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
            "DeepSpeed 0.19.8 loads only trainable parameters from a Universal Checkpoint: load frozen ones "
            "(zero/<name>/fp32.pt) and buffers (module, in mp_rank_00_model_states.pt) in your script"
        )
    if contents.optimizer is not None and len(contents.optimizer.groups) > 1:
        notes.append(
            "at stage 3 DeepSpeed 0.19.8 gives every parameter group the options of the first one and a shared step "
            "count, which grows by "
            f"{len(contents.optimizer.groups)} per step; load it at stage 1 or 2, or set both after loading"
        )
    kinds = {part[1] for part in map(optimizer_part, contents.shards) if part is not None}
    if not {"exp_avg", "exp_avg_sq"} <= kinds:
        notes.append(
            "at stage 3 DeepSpeed 0.19.8 loads only the state of Adam and AdamW from a Universal Checkpoint; load it "
            "at stage 1 or 2"
        )
    if contents.loss_scale is not None:
        notes.append("the loss scale is reset")
    notes.append(
        "only DeepSpeed's own learning rate schedulers resume; pass load_lr_scheduler_states=False for any other"
    )
    return notes


def _full_tensor(shard: LazyShard) -> Tensor:
    return shard.read(0, shard.end).reshape(shard.shape)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(value, buffer)  # in memory first: torch's own writer has no clear error for a full disk (torch 2.13)
    path.write_bytes(buffer.getbuffer())
    fsync(path)
