"""`parameter.grad` in a script, where DeepSpeed holds gradients elsewhere or has not reduced them yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import currentframe
from typing import Any

from torch import Tensor, nn

from unishard_deepspeed.private.partitioned import SHOWS_GRADIENT, is_of_engine

_GRAD: Any = Tensor.grad
"""torch's own attribute."""


def show(parameters: Iterable[nn.Parameter], read: Callable[[nn.Parameter], Tensor | None]) -> None:
    """Let `grad` of parameters be what a function returns.

    Args:
        parameters: Those that train, after a backward.
        read: Returns the gradient of the coming update; None if it is not final.
    """
    for parameter in parameters:
        setattr(parameter, SHOWS_GRADIENT, read)
        if type(parameter) is nn.Parameter:  # else one that is not gathered
            parameter.__class__ = _WithGradient


def hide(parameters: Iterable[nn.Parameter]) -> None:
    """Undo that, before torch or DeepSpeed computes with the parameters."""
    for parameter in parameters:
        vars(parameter).pop(SHOWS_GRADIENT, None)
        if type(parameter) is _WithGradient:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


class _WithGradient(nn.Parameter):
    """A parameter between a backward and a step."""

    @property
    def grad(self) -> Any:
        """The gradient of the coming update for the script, and DeepSpeed's own for DeepSpeed."""
        own = _GRAD.__get__(self)
        shown = None if is_of_engine(currentframe()) else getattr(self, SHOWS_GRADIENT)(self)
        return own if shown is None else shown

    @grad.setter
    def grad(self, value: Any) -> None:
        if not is_of_engine(currentframe()) and (shown := getattr(self, SHOWS_GRADIENT)(self)) is not None:
            shown.zero_()  # tells of an edit
        _GRAD.__set__(self, value)
