"""Reads what `engine.save_checkpoint` wrote: ZeRO stages 1, 2 and 3, any format and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unishard.checkpoint.contents import Stretch
from unishard.checkpoint.foreign import Contents, optimizer_of
from unishard.checkpoint.keys import PARAMETERS, of_optimizer
from unishard.checkpoint.manifest import LossScaleFacts, OptimizerFacts, ScheduleFacts
from unishard.errors import CheckpointError
from unishard_deepspeed.checkpoints.files import LossScaler, load
from unishard_deepspeed.checkpoints.fragments import constant, stitched, whole
from unishard_deepspeed.checkpoints.layout import Files, files_of
from unishard_deepspeed.checkpoints.partitions import Parameter, flat_groups, sub_groups

__all__ = ["read"]

_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "lr_scheduler",
    "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip
"""What DeepSpeed itself writes beside the model (DeepSpeed 0.19.8, runtime/engine.py, _common_checkpoint_state)."""


def read(source: Path) -> Contents:
    """What a checkpoint of DeepSpeed holds.

    Raises:
        CheckpointError: It is incomplete, damaged, names things that must not be run, or is of a kind that is not understood.
    """
    files = files_of(source)
    models = [load(path) for path in files.model]
    try:
        _check(models[0], files)
        states = [load(path)["optimizer_state_dict"] for path in files.optimizer]
        return _contents(files, models, states)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{files.folder}: is not as DeepSpeed 0.19.8 writes it ({type(error).__name__}: {error}); its files are of different "
            "checkpoints, or of another version"
        ) from error


def _check(model: dict[str, Any], files: Files) -> None:
    if model.get("mp_world_size", 1) > 1:
        raise CheckpointError(f"{files.folder}: the model is tensor or pipeline parallel, which is not understood")
    if any(key in model for key in ("num_experts", "ds_autoep_layers", "autoep_layers")):
        raise CheckpointError(f"{files.folder}: the model has experts (MoE), which is not understood")
    if not files.optimizer:
        raise CheckpointError(
            f"{files.folder}: has no files *_optim_states.pt. At ZeRO stage 0 DeepSpeed does not store which parameter each optimizer "
            "state belongs to; save under stage 1, 2 or 3"
        )


def _contents(files: Files, models: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> Contents:
    model, stage = models[0], int(states[0].get("zero_stage", 1))
    counts = states[0]["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else counts
    if ranks != len(states) or (stage == 3 and len(models) != len(states)):
        raise CheckpointError(
            f"{files.folder}: {ranks} ranks wrote it, but there are files of {len(states)}; files are missing or of an older checkpoint"
        )
    parameters = (sub_groups if stage == 3 else flat_groups)(states, model["param_shapes"], files.folder)
    base = states[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    ties = dict(model.get("shared_params") or {})
    buffers = {name: whole(model["module"][name]) for name in model["buffer_names"]}
    frozen = _frozen(models, {*parameters, *ties, *buffers}, stage)
    updates = model["global_steps"] - model["skipped_steps"]
    return Contents(
        stretches=_stretches(parameters) | {PARAMETERS + name: each for name, each in (frozen | buffers).items()},
        step=model["global_steps"],
        world_size=len(states),
        optimizer=_optimizer(base["param_groups"], parameters),
        ties=ties,
        frozen=tuple(frozen),
        buffers=tuple(buffers),
        schedule=ScheduleFacts(updates=updates),
        loss_scale=_loss_scale(states[0]),
        versions={"deepspeed": str(model.get("ds_version", "unknown"))},
        notes=tuple(_notes(model, frozen)),
    )


def _stretches(parameters: Mapping[str, Parameter]) -> dict[str, Stretch]:
    found: dict[str, Stretch] = {}
    for name, parameter in parameters.items():
        for key, pieces in parameter.pieces.items():
            place = PARAMETERS + name if key == "fp32" else of_optimizer(name, key)
            found[place] = stitched(place, parameter.shape, pieces)
        if parameter.step is not None:
            found[of_optimizer(name, "step")] = constant(parameter.step)
    return found


def _optimizer(groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, Parameter]) -> OptimizerFacts:
    named: list[list[str]] = [[] for _ in groups]
    for name, parameter in parameters.items():
        named[parameter.group].append(name)
    options = [{key: value for key, value in group.items() if key != "step"} for group in groups]
    return optimizer_of(zip(named, options, strict=True), {key for each in parameters.values() for key in each.pieces})


def _frozen(models: Sequence[dict[str, Any]], others: set[str], stage: int) -> dict[str, Stretch]:
    """Stage 3 stores a part of each on every rank; the others store them among the module's (stage 1 nowhere else)."""
    if stage < 3:
        return {name: whole(value) for name, value in models[0]["module"].items() if name not in others and isinstance(value, Tensor)}
    shapes = models[0].get("frozen_param_shapes") or {}
    return {
        name: stitched(name, shape, [model["frozen_param_fragments"][name].reshape(-1) for model in models])
        for name, shape in shapes.items()
    }


def _loss_scale(state: Mapping[str, Any]) -> LossScaleFacts | None:
    scaler = state.get("loss_scaler")
    if not isinstance(scaler, LossScaler):
        return None
    facts = vars(scaler)
    if "scale_window" not in facts:
        scale = float(facts.get("cur_scale", 1.0))
        return LossScaleFacts(value=scale, made=0) if scale != 1.0 else None
    # DeepSpeed grows on the update after the window is full (DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py, update_scale).
    since = facts["cur_iter"] - facts["last_overflow_iter"] - 1
    return LossScaleFacts(value=float(facts["cur_scale"]), made=max(0, (since - 1) % facts["scale_window"]) if since > 0 else 0)


def _notes(model: Mapping[str, Any], frozen: Mapping[str, Stretch]) -> list[str]:
    """What is left behind, and why."""
    notes = ["random numbers and the position in the data are not stored by DeepSpeed"]
    if model.get("lr_scheduler"):
        notes.append(
            "the state of DeepSpeed's learning-rate scheduler is not taken over; the rates stand as they were, and the config's schedule "
            "goes on from the number of updates"
        )
    client = sorted(set(model) - _KNOWN)
    if client:
        notes.append(f"what the script saved beside the model is not taken over: {', '.join(client)}")
    if any(each.dtype.itemsize < 4 for each in frozen.values()):
        notes.append("DeepSpeed keeps frozen parameters in the compute format alone; they are stored in it")
    return notes
