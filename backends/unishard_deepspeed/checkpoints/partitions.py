"""Finds each parameter in the flat partitions that DeepSpeed stores, for every kind of optimizer wrapper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from unishard.errors import CheckpointError

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Shape of each parameter by name, one mapping for each flat buffer of the optimizer."""


class Parameter(NamedTuple):
    """A trainable parameter."""

    group: int
    """Index of its parameter group."""
    shape: tuple[int, ...]
    shards: dict[str, list[Tensor]]
    """Flat shards of its master weight (`fp32`) and of each kind of optimizer state, in rank order."""
    step: Any
    """The optimizer's step count; None if it has none."""


def flat_groups(states: Sequence[dict[str, Any]], shapes: Shapes, folder: Path) -> dict[str, Parameter]:
    """Stages 1 and 2: one flat buffer for each parameter group, cut into equal partitions regardless of parameter
    boundaries.

    `param_slice_mappings` of each rank gives its shard of each parameter (DeepSpeed 0.19.8,
    runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py); the shards follow each other in rank order.

    Raises:
        CheckpointError: The buffers do not match the shapes.
    """
    parameters: dict[str, Parameter] = {}
    for group, named in enumerate(shapes):
        for name, shape in named.items():
            parameters[name] = Parameter(group, tuple(shape), {}, None)
        for state in states:
            flats, step = _flats(state["base_optimizer_state"], group, state["single_partition_of_fp32_groups"][group])
            for name, address in _within(state, "param_slice_mappings", folder)[group].items():
                for key, flat in flats.items():
                    parameters[name].shards.setdefault(key, []).append(
                        flat[address.start : address.start + address.numel]
                    )
                parameters[name] = _counted(parameters[name], step, folder)
    return parameters


def sub_groups(states: Sequence[dict[str, Any]], shapes: Shapes, folder: Path) -> dict[str, Parameter]:
    """Stage 3: each parameter is cut into equal, padded shards; each rank's shards are consecutive in the sub-group
    buffers.

    Raises:
        CheckpointError: The buffers do not match the shapes.
    """
    parameters: dict[str, Parameter] = {}
    owners = {
        index: group
        for group, each in enumerate(states[0]["optimizer_state_dict"]["param_groups"])
        for index in each["params"]
    }
    for index, named in enumerate(shapes):
        for name, shape in named.items():
            parameters[name] = Parameter(owners[index], tuple(shape), {}, None)
        for state in states:
            flats, step = _flats(state["optimizer_state_dict"], index, state["fp32_flat_groups"][index])
            at = 0
            for name in named:
                share = -(-math.prod(parameters[name].shape) // len(states))
                for key, flat in flats.items():
                    parameters[name].shards.setdefault(key, []).append(flat[at : at + share])
                parameters[name] = _counted(parameters[name], step, folder)
                at += share
            if at != flats["fp32"].numel():
                raise CheckpointError(
                    f"{folder}: the partitions of sub-group {index} do not have the size of a checkpoint by "
                    f"{len(states)} ranks (MiCS is not supported); convert a checkpoint of plain ZeRO-3"
                )
    return parameters


def _flats(optimizer: dict[str, Any], index: int, master: Tensor) -> tuple[dict[str, Tensor], Any]:
    """The tensors of the master weights' length, and the step count."""
    state = optimizer["state"].get(index, {})
    groups = optimizer["param_groups"]
    group: dict[str, Any] = next((each for each in groups if index in each.get("params", ())), {})
    # DeepSpeed's FusedAdam keeps the step count in the group (DeepSpeed 0.19.8, ops/adam/fused_adam.py).
    step = state.get("step", group.get("step"))
    flats = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() and value.numel() >= master.numel()
    }
    return {"fp32": master, **flats}, step


def _counted(parameter: Parameter, step: Any, folder: Path) -> Parameter:
    """The parameter with the step count of one more rank; all ranks must agree."""
    if parameter.step is not None and step is not None and float(parameter.step) != float(step):
        counts = f"{float(parameter.step):g} and {float(step):g}"
        raise CheckpointError(
            f"{folder}: the ranks' files are from different steps ({counts}); the checkpoint is inconsistent, use "
            "another one"
        )
    return parameter._replace(step=step)


def _within(state: dict[str, Any], key: str, folder: Path) -> Any:
    if key not in state:
        raise CheckpointError(
            f"{folder}: the layout of the parameters ({key}) is missing; it is from an old DeepSpeed, load and save it "
            "with a newer one"
        )
    return state[key]
