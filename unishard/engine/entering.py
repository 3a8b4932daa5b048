"""What every call of an engine runs in: errors that name their cause, and no inference mode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from unishard.engine.guards.inference_mode import as_no_grad, without_inference_tensors
from unishard.failures.endings import raise_cause

C = TypeVar("C", bound=type)


def entered(cls: C) -> C:
    """Decorate a class whose public methods users call, also the inherited ones.

    The error of a collective becomes a RankMismatchError that names the rank whose end has caused it, and inference
    mode is `torch.no_grad`, with arguments that can be written to.
    """
    for name in dir(cls):
        method = getattr(cls, name)
        if (
            inspect.isfunction(method)
            and not inspect.isgeneratorfunction(method)
            and (name == "__call__" or not name.startswith("_"))
        ):
            setattr(cls, name, _entered(method))
    return cls


def _entered(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if not torch.is_inference_mode_enabled():
                return method(*args, **kwargs)
            with as_no_grad():
                return method(*without_inference_tensors(args), **without_inference_tensors(kwargs))
        except (RuntimeError, OSError) as error:
            raise_cause(error)
            raise

    return call
