"""How stages 1 to 3 start to reduce gradients, changed: which have a hook, and what comes before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def create_hooks(optimizer: Any, create: Callable[[], None], without: Iterable[nn.Parameter]) -> None:
    """Recreate the hooks that reduce gradients, except for some parameters."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    for parameter in without:
        parameter.requires_grad_(False)
    create()
    for parameter in without:
        parameter.requires_grad_(True)


def call_before(optimizer: Any, name: str, first: Callable[[], None]) -> None:
    """Let a method of an optimizer call something first."""
    original = getattr(optimizer, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(optimizer, name, both)
