"""Reads what `engine.save_checkpoint` wrote: any ZeRO stage, dtype and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from unishard.checkpoint.tensor_names import PARAMETERS, of_optimizer
from unishard.contract.checkpoint_format import Contents
from unishard.contract.training_facts import LossScaleFacts, OptimizerFacts, ScheduleFacts, optimizer_of, plain
from unishard.distributed.lazy_shards import LazyShard
from unishard.errors import CheckpointError
from unishard_deepspeed.checkpoints import partitions, unpartitioned
from unishard_deepspeed.checkpoints.file_names import Files, files_of
from unishard_deepspeed.checkpoints.files import LossScaler, load
from unishard_deepspeed.checkpoints.joined_shards import constant, in_memory, joined

_KNOWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler",
    "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip
"""Keys that DeepSpeed itself writes (DeepSpeed 0.19.8, runtime/engine.py, _common_checkpoint_state)."""


def read(source: Path) -> Contents:
    """Read a DeepSpeed checkpoint.

    Raises:
        CheckpointError: It is incomplete or damaged, contains classes that are not admitted, or is of an unsupported
            kind.
    """
    files = files_of(source)
    models = [load(path) for path in files.model]
    try:
        _check(models[0], files)
        states = [load(path)["optimizer_state_dict"] for path in files.optimizer]
        return _contents(files, models, states)
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{files.folder}: does not have the layout of DeepSpeed 0.19.8 ({type(error).__name__}: {error}); its "
            "files are from different checkpoints, or from another version"
        ) from error


def _check(model: dict[str, Any], files: Files) -> None:
    if model.get("mp_world_size", 1) > 1:
        raise CheckpointError(f"{files.folder}: tensor and pipeline parallel models are not supported")
    if model.get("param_shapes") is not None and not files.optimizer:
        raise CheckpointError(f"{files.folder}: the files *_optim_states.pt are missing; the checkpoint is incomplete")
    if any(key in model for key in ("num_experts", "ds_autoep_layers", "autoep_layers")):
        raise CheckpointError(f"{files.folder}: experts (MoE) are not supported")


class _Trained(NamedTuple):
    """The state of the optimizer."""

    parameters: dict[str, partitions.Parameter]
    groups: Sequence[Mapping[str, Any]]
    scaler: Mapping[str, Any]
    """Attributes of the loss scaler."""


def _contents(files: Files, models: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> Contents:
    model, module = models[0], {name: value for name, value in models[0]["module"].items() if isinstance(value, Tensor)}
    buffers = {name: in_memory(module[name]) for name in model["buffer_names"]}
    shared = model.get("shared_params")
    ties = (
        unpartitioned.ties_of({name: value for name, value in module.items() if name not in buffers})
        if shared is None
        else dict(shared)
    )
    if states:
        trained = _partitioned(files, models, states)
    else:
        own = {name: value for name, value in module.items() if name not in ties and name not in buffers}
        trained = _unpartitioned(model["optimizer"], own, files.folder)
    frozen = _frozen(models, module, {*trained.parameters, *ties, *buffers})
    return Contents(
        shards=_lazy_shards(trained.parameters)
        | {PARAMETERS + name: each for name, each in (frozen | buffers).items()},
        step=model["global_steps"],
        world_size=model["dp_world_size"],
        optimizer=_optimizer(trained.groups, trained.parameters),
        ties=ties,
        frozen=tuple(frozen),
        buffers=tuple(buffers),
        schedule=ScheduleFacts(updates=model["global_steps"] - model["skipped_steps"]),
        loss_scale=_loss_scale(trained.scaler),
        versions={"deepspeed": str(model.get("ds_version", "unknown"))},
        notes=tuple(_notes(model, frozen, trained.groups)),
        archives=(*files.model, *files.optimizer),
    )


def _partitioned(files: Files, models: Sequence[dict[str, Any]], states: Sequence[dict[str, Any]]) -> _Trained:
    """Stages 1 to 3."""
    stage, counts = int(states[0].get("zero_stage", 1)), states[0]["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else counts
    if ranks != len(states) or (stage == 3 and len(models) != len(states)):
        raise CheckpointError(
            f"{files.folder}: {ranks} ranks wrote it, but there are files of {len(states)}; some are missing, or from "
            "an older checkpoint"
        )
    parameters = (partitions.sub_groups if stage == 3 else partitions.flat_groups)(
        states, models[0]["param_shapes"], files.folder
    )
    base = states[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    scaler = states[0].get("loss_scaler")
    return _Trained(parameters, base["param_groups"], vars(scaler) if isinstance(scaler, LossScaler) else {})


def _unpartitioned(stored: dict[str, Any] | None, tensors: Mapping[str, Tensor], folder: Path) -> _Trained:
    """Stage 0."""
    if not stored:
        raise CheckpointError(f"{folder}: has no optimizer state; load its weights into your model and start a new run")
    named = unpartitioned.named_by_values if "optimizer_state_dict" in stored else unpartitioned.named_by_shapes
    return _Trained(named(stored, tensors, folder), unpartitioned.groups_of(stored), stored)


def _lazy_shards(parameters: Mapping[str, partitions.Parameter]) -> dict[str, LazyShard]:
    shards_of: dict[str, LazyShard] = {}
    for name, parameter in parameters.items():
        for key, shards in parameter.shards.items():
            place = PARAMETERS + name if key == "fp32" else of_optimizer(name, key)
            shards_of[place] = joined(place, parameter.shape, shards)
        if parameter.step is not None:
            shards_of[of_optimizer(name, "step")] = constant(parameter.step)
    return shards_of


def _optimizer(groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, partitions.Parameter]) -> OptimizerFacts:
    named: list[list[str]] = [[] for _ in groups]
    for name, parameter in parameters.items():
        named[parameter.group].append(name)
    options = [{key: _number(value) for key, value in group.items() if key != "step"} for group in groups]
    return optimizer_of(zip(named, options, strict=True), {key for each in parameters.values() for key in each.shards})


def _number(value: Any) -> Any:
    """The value, as a number if it is a tensor with one element, as learning rates may be."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _frozen(models: Sequence[dict[str, Any]], module: Mapping[str, Tensor], others: set[str]) -> dict[str, LazyShard]:
    """The frozen parameters: stage 3 stores shards of them on every rank; the other stages store them in the module."""
    if len(models) > 1 or models[0].get("frozen_param_fragments"):
        shapes = models[0].get("frozen_param_shapes") or {}
        shards = {name: [model["frozen_param_fragments"][name].reshape(-1) for model in models] for name in shapes}
        return {name: joined(name, shape, shards[name]) for name, shape in shapes.items()}
    return {name: in_memory(value) for name, value in module.items() if name not in others}


def _loss_scale(scaler: Mapping[str, Any]) -> LossScaleFacts | None:
    if scaler.get("scale_window") is None:
        scale = float(scaler.get("cur_scale", 1.0))
        return LossScaleFacts(value=scale, made=0) if scale != 1.0 else None
    # DeepSpeed grows the scale one step after the window is full (DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py,
    # update_scale).
    since = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1
    return LossScaleFacts(
        value=float(scaler["cur_scale"]), made=(since - 1) % scaler["scale_window"] if since > 0 else 0
    )


def _notes(model: Mapping[str, Any], frozen: Mapping[str, LazyShard], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes on what is not converted, and why."""
    notes = ["DeepSpeed stores no random number state and no data position"]
    if model.get("lr_scheduler"):
        notes.append(
            "not converted: DeepSpeed's learning rate scheduler; the learning rates are kept, and the config's "
            "schedule continues from the number of optimizer steps"
        )
    if model.get("param_shapes") is None:
        notes.append(
            "ZeRO stage 0 stores no names: optimizer states were matched to parameters by master weights, or in fp32 "
            "by shape and order"
        )
    dropped = {key for group in groups for key, value in group.items() if not plain(_number(value))}
    dropped |= {name for name, value in model["module"].items() if not isinstance(value, Tensor)}
    if dropped:
        notes.append(f"not converted: {', '.join(sorted(dropped))}, which are neither tensors nor plain values")
    client = sorted(set(model) - _KNOWN)
    if client:
        notes.append(f"not converted: {', '.join(client)}, saved by the script (client_state)")
    if any(each.dtype.itemsize < 4 for each in frozen.values()):
        notes.append("DeepSpeed keeps frozen parameters only in the compute dtype; they are stored in it")
    return notes
