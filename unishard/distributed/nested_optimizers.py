"""Optimizers that hold others, such as Lookahead around AdamW: find them all, and copy them together."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer with the hooks on its step (torch 2.13, optim/optimizer.py)."""
_OWN = {"param_groups", "state", "defaults"}


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those that its attributes hold."""
    found = {id(optimizer): optimizer}
    for each in (waiting := [optimizer]):
        for _, value in _leaves([value for name, value in vars(each).items() if name not in _OWN], ()):
            if isinstance(value, Optimizer) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return waiting


def completed(optimizer: Optimizer) -> Optimizer:
    """The optimizer, with what torch's constructor makes, which some do not call, such as timm's Lookahead."""
    for each in optimizers_in(optimizer):
        vars(each).setdefault("defaults", {})
        Optimizer.__setstate__(each, {})
    return optimizer


def groups_in(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups of all these, each once; first its own."""
    return [*{id(group): group for each in optimizers_in(optimizer) for group in each.param_groups}.values()]


def attributes_of(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """The numbers and tensors that these optimizers keep in attributes and in options of groups, by their place."""
    for number, each in enumerate(optimizers_in(optimizer)):
        for name, value in vars(each).items():
            if name not in _OWN and name not in HOOKS:
                yield from _leaves(value, (number, name))
    for number, group in enumerate(groups_in(optimizer)):
        for name, value in group.items():
            if name != "params":
                yield from _leaves(value, ("group", number, name))


def holds_copies(optimizer: Optimizer, shapes: Collection[torch.Size]) -> bool:
    """Whether it has made copies of parameters of these shapes when it was constructed."""
    return any(
        isinstance(value, Tensor) and value.dim() and value.shape in shapes for _, value in attributes_of(optimizer)
    )


def write_attribute(optimizer: Optimizer, place: str, value: Any) -> None:
    """Write one of `attributes_of`, which the first step may create."""
    at: Any = {str(number): vars(each) for number, each in enumerate(optimizers_in(optimizer))}
    at["group"] = groups_in(optimizer)
    *path, last = place.split("/")
    for key in path:
        at = at[_key(at, key)]
    at[_key(at, last)] = value


def copied(optimizer: Optimizer, moved: Mapping[int, Tensor]) -> Optimizer:
    """A copy of an optimizer with all that it holds, which may step; no hook is called then.

    Args:
        optimizer: Is not changed, nor is it when its copy steps.
        moved: What the copy has in the place of parameters, by `id`.
    """
    known: dict[int, Any] = {**moved}
    every = optimizers_in(optimizer)
    known |= {id(each): object.__new__(type(each)) for each in every}
    for each in every:
        # A scheduler has set a `step` that is bound to the optimizer.
        values = {name: _copied(value, known) for name, value in vars(each).items() if name != "step"}
        vars(known[id(each)]).update(values | {name: OrderedDict() for name in HOOKS})
    copy_of: Optimizer = known[id(optimizer)]
    return copy_of


def discard(copy_of: Optimizer) -> None:
    """Call it after the last step of a copy: some optimizers free in `__del__` what it shares with the original
    (DeepSpeed 0.19.8, ops/adam/cpu_adam.py).
    """
    for each in optimizers_in(copy_of):
        each.__class__ = torch.optim.Optimizer


def _leaves(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*place, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, (*place, number))
    elif isinstance(value, int | float | Tensor | Optimizer):
        yield "/".join(map(str, place)), value


def _key(at: Any, name: str) -> Any:
    return int(name) if isinstance(at, list) else next((key for key in at if str(key) == name), name)


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        known[id(value)] = value.detach().clone()
    elif isinstance(value, dict):
        known[id(value)] = new = copy.copy(value)
        new.clear()
        new.update({_copied(key, known): _copied(item, known) for key, item in value.items()})
    elif isinstance(value, list):
        known[id(value)] = []
        known[id(value)] += [_copied(item, known) for item in value]
    elif type(value) is tuple:
        return tuple(_copied(item, known) for item in value)
    elif isinstance(value, torch.Generator):
        return value.clone_state()
    elif isinstance(value, set) or (hasattr(value, "__dict__") and not callable(value)):  # modules are called
        return copy.copy(value)
    return known.get(id(value), value)
