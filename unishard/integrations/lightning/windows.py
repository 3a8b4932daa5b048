"""An engine whose accumulation windows Lightning ends, with losses that Lightning has divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

from torch import Tensor, nn

from unishard.engine.engine import Engine
from unishard.errors import ConfigError, ContractError, Problem

__all__ = ["Windows", "parts_of"]


class Windows:
    """Translates Lightning's order of calls into the engine's. The coming micro-batch ends its window unless told."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._last, self._waits = True, False
        self._clip: float | EllipsisType = ...
        engine.set_boundary(True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """A block with a forward and a backward after which the window goes on."""
        self._say(last=False)
        yield
        self._say(last=True)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a divided loss.

        Raises:
            ContractError: The last one ended its window, and no step followed.
        """
        if self._waits:
            raise ContractError(
                "a second backward before optimizer.step(); to accumulate, put every micro-batch but the last one of a "
                "step, forward and backward, into `with optimizer.toggle_model(sync_grad=False):` (Trainer, manual "
                "optimization) or `with fabric.no_backward_sync(model):` (Fabric)"
            )
        self.engine.backward(loss, *args, scaled=True, **kwargs)
        self._waits = self._last
        if not self._last:
            self.engine.step()

    def clip(self, max_norm: float) -> Tensor:
        """The norm of the gradients, which the step will clip."""
        self._clip = float(max_norm)
        return self.engine.grad_norm()

    def step(self) -> None:
        """Update the parameters."""
        clip, self._clip, self._waits = self._clip, ..., False
        self.engine.step(clip)
        self._say(last=True)

    def discard(self) -> None:
        """Drop the gradients of the window."""
        self._clip, self._waits = ..., False
        self.engine.discard()
        self._say(last=True)

    def _say(self, *, last: bool) -> None:
        self._last = last
        self.engine.set_boundary(last)


def refuse_clip(what: str) -> ConfigError:
    """The error of a clipping that engines cannot do."""
    return ConfigError([Problem("training.gradient_clipping", f"{what}; engines clip by the norm of all gradients")])


def parts_of(module: nn.Module) -> list[str]:
    """The modules that a loop may call by themselves: children, also those in containers, which have no forward."""
    found: list[str] = []
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:
            found += [f"{name}.{inner}" for inner in parts_of(child)]
        elif next(child.parameters(), None) is not None:
            found.append(name)
    return found
