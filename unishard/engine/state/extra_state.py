"""What modules return from `get_extra_state`, which torch keeps in a state dict beside their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def extra_state_of(model: nn.Module) -> dict[str, Any] | None:
    """By name of the module; None if no module has any."""
    return {name: module.get_extra_state() for name, module in _with_extra_state(model)} or None


def restore_extra_state(model: nn.Module, saved: Mapping[str, Any] | None) -> Iterator[str]:
    """Give modules the extra state of a checkpoint.

    Yields:
        Notes about what differs.
    """
    left = dict(saved or {})
    for name, module in _with_extra_state(model):
        if name in left:
            module.set_extra_state(left.pop(name))
        else:
            yield f"it lacks the extra state of {name or 'the model'}, which stays as it is"
    for name in left:
        yield f"its extra state of {name or 'the model'} is not loaded: the model has no such module"


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module
