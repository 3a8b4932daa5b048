"""Divides, measures and clips the gradients of one update, on ZeRO's optimizers and at stage 0."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grads_with_norm_

from unishard.engine.norm import norm_of
from unishard_deepspeed import internals

__all__ = ["Clipping", "clipping_of"]


class Clipping(Protocol):
    """How the gradients of an update are divided and clipped, and how it turned out."""

    def prepare(self, max_norm: float | None, divisor: float) -> None:
        """Before `engine.step()`: divide by this, and clip to this norm or not at all."""

    def step(self) -> tuple[float, bool]:
        """Call `engine.step()`: the norm before clipping, and whether the update was made."""
        ...


def clipping_of(engine: Any, *, skips: bool) -> Clipping:
    """What suits the optimizer that a DeepSpeed engine runs.

    Args:
        engine: Of `deepspeed.initialize`.
        skips: Whether an update that is not finite is left out.
    """
    return TorchClipping(engine, skips=skips) if engine.zero_optimization_stage() == 0 else EngineClipping(engine, skips=skips)


class EngineClipping:
    """DeepSpeed's optimizer divides, clips and keeps the norm, and leaves out an update that is not finite, unless it is kept from it."""

    def __init__(self, engine: Any, *, skips: bool) -> None:
        self._engine = engine
        self._skips = skips

    def prepare(self, max_norm: float | None, divisor: float) -> None:
        """Set the optimizer's own limit (0 switches it off) and divisor."""
        self._engine.optimizer.clip_grad = max_norm or 0.0
        internals.divide_gradients(self._engine.optimizer, divisor)

    def step(self) -> tuple[float, bool]:
        """Read both off the engine. The norm of an update that was left out is infinite."""
        with nullcontext([False]) if self._skips else internals.making_every_update(self._engine.optimizer) as invalid:
            self._engine.step()
        internals.divide_gradients(self._engine.optimizer, 1.0)
        norm = math.inf if any(invalid) else float(self._engine.get_global_grad_norm())
        return norm, bool(self._engine.was_step_applied()) or not self._skips


class TorchClipping:
    """Stage 0: divide and clip in the torch optimizer's step hook, between DeepSpeed's all-reduce and the update.

    DeepSpeed discards the norm in fp32, and in bf16 and fp16 takes it of gradients that it has rounded (DeepSpeed 0.19.8,
    moe/utils.py, split_params_grads_into_shared_and_expert_params).
    """

    def __init__(self, engine: Any, *, skips: bool) -> None:
        internals.without_own_clipping(engine)
        self._engine = engine
        self._skips = skips
        self._max_norm: float | None = None
        self._divisor = 1.0
        self._norm = math.inf
        inner = internals.torch_optimizer(engine.optimizer)
        self._measures = inner is not engine.optimizer
        """Whether DeepSpeed's own optimizer is around it, which takes a norm too."""
        inner.register_step_pre_hook(self._before_update)

    def prepare(self, max_norm: float | None, divisor: float) -> None:
        """Remember both for the hook."""
        self._max_norm, self._divisor = max_norm, divisor

    def step(self) -> tuple[float, bool]:
        """What the hook found; where DeepSpeed leaves the update out, it does not run."""
        self._norm = math.inf
        # DeepSpeed's norm is of gradients rounded to fp16, so that a sum beyond 65504 would be left out though it is finite in fp32.
        # What is not finite in fp32 it still leaves out, by another check before.
        internals.give_wide_gradients(self._engine.optimizer)
        with internals.making_every_update(self._engine.optimizer) if self._measures else nullcontext():
            self._engine.step()
        return self._norm, math.isfinite(self._norm) or not self._skips

    @torch.no_grad()
    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._divisor != 1:
            torch._foreach_div_(gradients, self._divisor)
        norm = norm_of(gradients)
        self._norm = float(norm)
        if self._skips and not math.isfinite(self._norm):
            for parameter in parameters:
                parameter.grad = None  # torch's optimizers pass over parameters without gradient
        elif self._max_norm is not None:
            clip_grads_with_norm_(parameters, self._max_norm, norm)
