"""Which parameters of a model require a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def set_requires_grad(module: nn.Module, names: Sequence[str], value: bool) -> None:
    """Freeze parameters of a model, or make them trainable.

    Args:
        module: The model.
        names: Names of its parameters; a tied parameter has several.
        value: Whether they require a gradient.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        named[name].requires_grad_(value)


@contextmanager
def frozen_parameters(module: nn.Module) -> Iterator[None]:
    """A block in which no parameter of a model requires a gradient."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
