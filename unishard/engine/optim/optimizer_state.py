"""The state that an optimizer keeps of one tensor: which keys it has, and how it is made without an update."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unishard.errors import CheckpointError

__all__ = ["Keys", "StateSpec", "fresh_state", "keys_of", "tensors_and_numbers"]


class StateSpec(NamedTuple):
    """What state a tensor is to have."""

    tensors: Mapping[str, torch.dtype]
    """Keys whose tensor has the parameter's shape, such as `exp_avg`."""
    numbers: Mapping[str, float]
    """Keys that are one number, such as `step`."""


class Keys(NamedTuple):
    """What an optimizer's first update makes."""

    tensors: Mapping[str, torch.dtype]
    """Keys whose tensor has the parameter's shape."""
    numbers: Mapping[str, Any]
    """Keys that are one number, as they are after that update: a tensor of one element, an int or a float."""
    nothing: frozenset[str]
    """Keys that are None."""


_KNOWN: WeakKeyDictionary[Any, dict[tuple[Any, ...], Keys]] = WeakKeyDictionary()
"""Of each optimizer, by the options of a group and what it steps."""
_RATES = ("lr", "initial_lr")
"""Options that change from update to update and decide no key."""


@torch.no_grad()
def fresh_state(optimizer: Any, group: Mapping[str, Any], like: Tensor, spec: StateSpec) -> dict[str, Any]:
    """Optimizer state for one tensor: zeros, and the numbers as given, in the form in which this optimizer keeps them.

    Args:
        optimizer: A torch optimizer; it is not changed.
        group: That of its groups whose options hold.
        like: What the optimizer steps: a parameter, a DTensor or a flat master.
        spec: What to make.

    Raises:
        CheckpointError: This optimizer keeps no such number, or what it keeps cannot be found out.
    """
    keys = keys_of(optimizer, group, like)
    for name in spec.numbers:
        if name not in keys.numbers:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps no number {name!r}, only {', '.join(keys.numbers) or 'none'}; "
                "load the state with the optimizer that it was saved from, or leave it out"
            )
    state: dict[str, Any] = dict.fromkeys(keys.nothing)
    state |= {name: torch.zeros_like(like, dtype=dtype) for name, dtype in spec.tensors.items()}
    return state | {name: _in_form(keys.numbers[name], number) for name, number in spec.numbers.items()}


def keys_of(optimizer: Any, group: Mapping[str, Any], like: Tensor | None = None) -> Keys:
    """Which keys the first update of a tensor makes, and of what kind, found by stepping a copy of the optimizer.

    Args:
        optimizer: A torch optimizer; neither it nor its groups are changed, and nothing that hangs on its `step` is called.
        group: That of its groups whose options hold.
        like: What it steps; without it, the group's first tensor.

    Raises:
        CheckpointError: The optimizer cannot step by itself, or keeps something that is neither a number nor in the parameter's shape.
    """
    if like is None:
        like = next(iter(group["params"]), torch.empty(1))
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    told = sorted((name, repr(value)) for name, value in options.items() if name not in _RATES)
    which, known = (like.device, like.dtype, like.dim(), *told), _KNOWN.setdefault(optimizer, {})
    if which not in known:
        # In no dimension as long as in another, so that a state for each row or column is not taken for one of the parameter's shape.
        shape = tuple(range(2, 2 + max(1, like.dim())))
        dummy = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        known[which] = _kinds(optimizer, _first_state(optimizer, options, dummy), dummy.shape)
    return known[which]


def tensors_and_numbers(
    optimizer: Any, group: Mapping[str, Any], like: Tensor, state: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of one tensor: what has its shape, as live memory, and the numbers, each a new 0-d fp32 tensor on the CPU.

    Args:
        optimizer: A torch optimizer.
        group: That of its groups whose options hold.
        like: What the optimizer steps.
        state: What it keeps of that; nothing for what it has never updated.

    Raises:
        CheckpointError: The optimizer keeps something that is neither.
    """
    if not state:
        return {}, {}
    known = keys_of(optimizer, group, like)  # of a parameter without dimensions, shapes say nothing
    later = _kinds(optimizer, {name: value for name, value in state.items() if name not in {*known.tensors, *known.numbers}}, like.shape)
    kept = {name: value for name, value in state.items() if value is not None}
    tensors = {name: value for name, value in kept.items() if name in known.tensors or name in later.tensors}
    numbers = {name: value for name, value in kept.items() if name not in tensors}
    return tensors, {name: torch.tensor(float(value), dtype=torch.float32) for name, value in numbers.items()}


def _in_form(example: Any, number: float) -> Any:
    if isinstance(example, Tensor):
        return torch.full_like(example, number)
    return type(example)(number)


def _kinds(optimizer: Any, state: Mapping[str, Any], shape: torch.Size) -> Keys:
    nothing = frozenset(name for name, value in state.items() if value is None)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == shape}
    numbers = {name: value for name, value in state.items() if name not in tensors and name not in nothing}
    for name, value in numbers.items():
        if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps {name!r} as {what}, neither in the parameter's shape nor as one number, so it cannot be "
                "divided with the parameter; use an optimizer whose state is by element, such as AdamW"
            )
    return Keys({name: value.dtype for name, value in tensors.items()}, numbers, nothing)


@torch.no_grad()
def _first_state(optimizer: Any, options: Mapping[str, Any], dummy: nn.Parameter) -> dict[str, Any]:
    """What a copy of the optimizer makes of a parameter in one step, with a gradient of zeros."""
    kind = type(optimizer)
    inner = [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        raise CheckpointError(
            f"{kind.__name__} steps another optimizer, its {inner[0]}, whose state cannot be told from its own; use that one"
        )
    dummy.grad = torch.zeros_like(dummy)
    own = object.__new__(kind)
    vars(own).update({name: _apart(value) for name, value in vars(optimizer).items()})
    vars(own).update(param_groups=[{**copy.deepcopy(dict(options)), "params": [dummy]}], state=defaultdict(dict))
    vars(own).pop("step", None)  # a scheduler has put one there that is bound to `optimizer`
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # torch 2.13, optim/optimizer.py
        vars(own)[name] = OrderedDict()
    try:
        with torch.random.fork_rng([dummy.device] if dummy.is_cuda else []):  # some add noise
            own.step()
    except Exception as error:  # whatever the user's own class raises
        raise CheckpointError(
            f"what {kind.__name__} keeps of a parameter cannot be found out, as its step fails on a copy: {type(error).__name__}: {error}; "
            "let it step without arguments, with nothing but its groups"
        ) from error
    finally:
        # Some free in __del__ what the copy shares with the original (DeepSpeed 0.19.8, ops/adam/cpu_adam.py).
        own.__class__ = torch.optim.Optimizer
    return dict(own.state[dummy])


def _apart(value: Any) -> Any:
    """An attribute that the copy may change in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value
