"""Clips and measures the gradients of one update, on ZeRO's optimizers and at stage 0."""

from __future__ import annotations

import math
from typing import Any, Protocol

from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from unishard_deepspeed import internals

__all__ = ["Clipping", "clipping_of"]


class Clipping(Protocol):
    """How an update is clipped, and how it turned out."""

    def prepare(self, max_norm: float | None) -> None:
        """Before `engine.step()`: clip it to this norm, or not at all."""

    def outcome(self) -> tuple[float, bool]:
        """After `engine.step()`: the norm before clipping, and whether the update was made."""
        ...


def clipping_of(engine: Any) -> Clipping:
    """What suits the optimizer that a DeepSpeed engine runs."""
    return EngineClipping(engine) if hasattr(engine.optimizer, "clip_grad") else TorchClipping(engine)


class EngineClipping:
    """DeepSpeed's optimizer clips, keeps the norm, and leaves out an update that is not finite."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def prepare(self, max_norm: float | None) -> None:
        """Set the optimizer's own limit; 0 switches it off."""
        self._engine.optimizer.clip_grad = max_norm or 0.0

    def outcome(self) -> tuple[float, bool]:
        """Read both off the engine. The norm of an update that was left out is infinite."""
        return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())


class TorchClipping:
    """Stage 0 in fp32 runs the bare torch optimizer: clip in its step hook, between DeepSpeed's all-reduce and the update."""

    def __init__(self, engine: Any) -> None:
        internals.without_own_clipping(engine)
        self._max_norm: float | None = None
        self._norm = math.nan
        engine.optimizer.register_step_pre_hook(self._before_update)

    def prepare(self, max_norm: float | None) -> None:
        """Remember the limit for the hook."""
        self._max_norm = max_norm

    def outcome(self) -> tuple[float, bool]:
        """What the hook found."""
        return self._norm, math.isfinite(self._norm)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self._norm = float(norm)
        if not math.isfinite(self._norm):
            for parameter in parameters:
                parameter.grad = None  # torch's optimizers pass over parameters without gradient
        elif self._max_norm is not None:
            clip_grads_with_norm_(parameters, self._max_norm, norm)
