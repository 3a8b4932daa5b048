"""Gradients and parameters of a DeepSpeed engine, by the parameters of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unishard.parts import Part
from unishard_deepspeed.internals import parts

__all__ = ["Access"]


class Access:
    """What a window's gradients and the masters are made of, on every stage."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._gradients: dict[nn.Parameter, Part] | None = None
        """Of the window that is at its end."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients now instead of in `engine.step()`. Collective."""
        parts.reduce_gradients(self._engine)
        self._gradients = parts.gradient_parts(self._engine)

    def gradient(self, parameter: nn.Parameter) -> Part | None:
        """After `reduce`: this rank's part of a gradient."""
        return None if self._gradients is None else self._gradients.get(parameter)

    def master(self, parameter: nn.Parameter) -> Part:
        """This rank's part of a master."""
        return parts.master_part(self._engine.optimizer, parameter)

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Bring the parameter up to its edited master."""
        parts.low_precision_copy(self._engine.optimizer, parameter, value)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Inside, if `reduce` was called, `engine.step()` takes the gradients as they are now."""
        if self._gradients is None:
            yield
            return
        self._gradients = None
        parts.measure_offloaded(self._engine.optimizer)
        with parts.already_reduced(self._engine):
            yield

    @torch.no_grad()
    def drop(self) -> None:
        """Forget the window."""
        self._gradients = None
        parts.drop_gradients(self._engine)
