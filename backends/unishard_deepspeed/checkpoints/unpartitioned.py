"""ZeRO stage 0: nothing is sharded, but DeepSpeed stores optimizer state without names.

They are inferred from values or shapes.

There are three layouts (DeepSpeed 0.19.8): the user's optimizer itself (fp32); runtime/fp16/unfused_optimizer.py, with
a master weight for each parameter; runtime/fp16/fused_optimizer.py, with one flat master weight for each group. A
rounded master weight equals its parameter bit by bit, which identifies it. In fp32 there are only shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unishard.errors import CheckpointError
from unishard_deepspeed.checkpoints.partitions import Parameter


def ties_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Maps names of tensors that share memory to the first such name."""
    first: dict[tuple[int, torch.Size], str] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            names[name] = first.setdefault((tensor.data_ptr(), tensor.shape), name)
    return {name: other for name, other in names.items() if name != other}


def named_by_values(stored: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Parameter]:
    """Match optimizer state to parameters by master weights.

    Raises:
        CheckpointError: A master weight matches no parameter.
    """
    base, left = stored["optimizer_state_dict"], dict(tensors)
    parameters: dict[str, Parameter] = {}
    for group, masters in enumerate(stored.get("fp32_groups") or stored["fp32_groups_flat"]):
        flat = isinstance(masters, Tensor)
        for place, master in enumerate([masters] if flat else masters):
            index = base["param_groups"][group]["params"][place]
            at, values = 0, master.reshape(-1)
            while at < values.numel():
                name = _matching(values[at:], left, exactly=not flat)
                if name is None:
                    raise CheckpointError(
                        f"{folder}: a master weight of group {group} matches no parameter of the model (ZeRO stage 0 "
                        "stores no names); save under stage 1, 2 or 3"
                    )
                numel = left[name].numel()
                parameters[name] = _parameter(group, left.pop(name), values, at, base["state"].get(index, {}))
                at += numel
    return parameters


def _matching(values: Tensor, left: Mapping[str, Tensor], *, exactly: bool) -> str | None:
    """The first parameter that equals the rounded values, or with `exactly=False` a prefix of them."""
    for name, tensor in left.items():
        size = tensor.numel()
        if (size == values.numel() if exactly else 0 < size <= values.numel()) and torch.equal(
            values[:size].to(tensor.dtype), tensor.reshape(-1)
        ):
            return name
    return None


def _parameter(group: int, tensor: Tensor, master: Tensor, at: int, state: Mapping[str, Any]) -> Parameter:
    end = at + tensor.numel()
    kept = {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor) and value.numel() == master.numel() and key != "step"
    }
    shards = {key: [value.reshape(-1)[at:end]] for key, value in {"fp32": master, **kept}.items()}
    return Parameter(group, tuple(tensor.shape), shards, state.get("step"))


def named_by_shapes(stored: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Parameter]:
    """Match optimizer state to parameters by shape: in the model's order, if that is unambiguous.

    Raises:
        CheckpointError: Parameters of the same shape are in several groups, or only some of them have state.
    """
    groups, states = stored["param_groups"], stored["state"]
    indices = {index: group for group, each in enumerate(groups) for index in each["params"]}
    if len(groups) == 1 and len(indices) == len(tensors):
        pairs = dict(zip(indices, tensors, strict=True))
    else:
        pairs = _by_shape(indices, states, tensors, folder)
    parameters = {}
    for index, name in pairs.items():
        state = states.get(index, {})
        if any(
            isinstance(value, Tensor) and value.dim() and value.shape != tensors[name].shape for value in state.values()
        ):
            raise CheckpointError(
                f"{folder}: {_UNNAMED}, and their shapes are not in the model's order; save under stage 1, 2 or 3"
            )
        if state:
            parameters[name] = _parameter(indices[index], tensors[name], tensors[name], 0, state)
    return parameters


_UNNAMED = "ZeRO stage 0 does not store which parameter each optimizer state belongs to"


def _by_shape(
    indices: Mapping[int, int], states: Mapping[int, Mapping[str, Any]], tensors: Mapping[str, Tensor], folder: Path
) -> dict[int, str]:
    held: dict[torch.Size, list[int]] = defaultdict(list)
    for index in indices:
        if states.get(index):
            shapes = [
                value.shape for key, value in states[index].items() if isinstance(value, Tensor) and key != "step"
            ]
            held[shapes[0] if shapes else torch.Size()].append(index)
    there: dict[torch.Size, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        there[tensor.shape].append(name)
    for shape, those in held.items():
        if len(those) != len(there[shape]) or len({indices[index] for index in those}) > 1:
            raise CheckpointError(
                f"{folder}: {_UNNAMED}, and several have the shape {tuple(shape)}; save under stage 1, 2 or 3"
            )
    return {index: name for shape, those in held.items() for index, name in zip(those, there[shape], strict=True)}


def groups_of(stored: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The options of each parameter group."""
    base: Mapping[str, Any] = stored.get("optimizer_state_dict", stored)
    groups: Sequence[Mapping[str, Any]] = base["param_groups"]
    return groups
