"""Refuse steps of optimizers over a prepared model's parameters that are not the engine's own."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unishard.errors import ContractError


class OwnCalls:
    """Whether the engine calls its optimizer, and not the user's code."""

    def __init__(self) -> None:
        self.running = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """A block in which calls of the optimizer are the engine's."""
        self.running = True
        try:
            yield
        finally:
            self.running = False


_MARK, _NAME = "_unishard_model", "_unishard_name"
"""Attributes of parameters: the number of the model that was prepared, and the name in it. Sharding keeps attributes,
also on the parameters it replaces."""

_trained: dict[int, str] = {}
"""The class of each model that an open engine trains."""

_own: WeakKeyDictionary[torch.optim.Optimizer, OwnCalls] = WeakKeyDictionary()
"""The optimizers that engines step, and who calls them."""

_admitted: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = WeakKeyDictionary()
"""Other optimizers: how many models were prepared, and how many groups they had, when their parameters were looked
at."""

_numbers = count(1)
_prepared = 0
"""How many models have been prepared for training."""


def mark(model: nn.Module) -> None:
    """Mark the parameters of a model before it is sharded."""
    number = next(_numbers)
    for name, parameter in model.named_parameters():
        setattr(parameter, _MARK, number)
        setattr(parameter, _NAME, name)


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether a parameter belongs to a model that was prepared for training."""
    return hasattr(parameter, _MARK)


def same_model(one: Tensor, other: Tensor) -> bool:
    """Whether two parameters belong to one model that was prepared for training, before or after it was sharded."""
    return getattr(one, _MARK, None) == getattr(other, _MARK, 0)


def replaced(model: nn.Module) -> WeakValueDictionary[str, nn.Parameter]:
    """The parameters that sharding a marked model has replaced, by name, while something such as a list holds them.

    Looked for among all objects, since torch swaps no tensor to which there are weak references.
    """
    now = {id(parameter) for parameter in model.parameters()}
    number = next((getattr(parameter, _MARK, 0) for parameter in model.parameters()), 0)
    parameters = (each for each in gc.get_objects() if type(each) is nn.Parameter and id(each) not in now)
    return WeakValueDictionary(
        {getattr(each, _NAME): each for each in parameters if getattr(each, _MARK, None) == number}
    )


def watch(model: nn.Module, class_name: str, optimizers: Iterable[Any], own: OwnCalls) -> int:
    """From now on let only the engine step a marked model's parameters, before or after sharding, and only with these
    optimizers.

    Args:
        model: A prepared model.
        class_name: Its class before it was sharded.
        optimizers: Those that the engine steps; others than torch's are ignored.
        own: Whether the engine is calling them.

    Returns:
        A number for `forget`.
    """
    global _prepared
    if not _prepared:
        register_optimizer_step_pre_hook(_before_step)
    _prepared += 1
    number = next((number for parameter in model.parameters() if (number := getattr(parameter, _MARK, 0))), 0) or next(
        _numbers
    )
    for parameter in model.parameters():
        setattr(parameter, _MARK, number)
    _trained[number] = class_name
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            _own[optimizer] = own
    return number


def forget(number: int, own: OwnCalls) -> None:
    """Watch a model and its optimizers no longer."""
    _trained.pop(number, None)
    for optimizer in [optimizer for optimizer, caller in _own.items() if caller is own]:
        del _own[optimizer]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of torch before the step of any optimizer: microseconds, but for the first step of one that is not an
    engine's.
    """
    own = _own.get(optimizer)
    if own is not None:
        if not own.running:
            raise ContractError(
                f"{type(optimizer).__name__}.step() was called, but the engine steps this optimizer; remove the call: "
                "engine.step() updates the parameters, zeroes their gradients and steps the scheduler"
            )
        return
    if any(each.running for each in _own.values()):  # one that an engine's optimizer holds
        return
    seen = _prepared, len(optimizer.param_groups)
    if _admitted.get(optimizer) != seen:
        _require_other_parameters(optimizer)
        _admitted[optimizer] = seen


def _require_other_parameters(optimizer: torch.optim.Optimizer) -> None:
    marks = [getattr(parameter, _MARK, 0) for group in optimizer.param_groups for parameter in group["params"]]
    for number in set(marks) & _trained.keys():
        raise ContractError(
            f"{type(optimizer).__name__}.step() was called on {marks.count(number)} parameters of the "
            f"{_trained[number]} that unishard.prepare has prepared without it, so it would train nothing, or bypass "
            "the engine; create it before prepare and pass it, as in unishard.prepare(model, cfg, "
            "optimizer=optimizer), or remove it: engine.step() updates the parameters"
        )
