"""Divide and clip the gradients of an update and take their norm, on ZeRO's optimizers and at stage 0."""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from unishard.contract.kit.grad_norm import divide, norm_of
from unishard.contract.kit.skipping import DeviceSkip
from unishard.distributed.host_read import HostRead
from unishard.distributed.slices import slice_of
from unishard_deepspeed.private import PRIVATE_API
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


class EngineClipping:
    """Stages 1 to 3: DeepSpeed's optimizer clips, keeps the norm, and skips non-finite updates unless `nonfinite` is
    `ignore`.
    """

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero = zero
        self._engine, self._optimizer = zero.engine, zero.optimizer
        self._skips = zero.spec.skips
        self._limit: float = zero.spec.native["gradient_clipping"]
        """The optimizer's maximum norm, 0 for no clipping."""
        self._divisor = 1.0

    def prepare(self, max_norm: float | None, divisor: float) -> None:
        """Set the optimizer's limit and divisor if they have changed."""
        if (max_norm or 0.0) != self._limit:
            PRIVATE_API["clipping"].require()
            self._limit = max_norm or 0.0
            self._optimizer.clip_grad = self._limit
        if divisor != 1 or self._divisor != 1:
            self._zero.cases.divisor.require()
            self._divisor = divisor
            self._optimizer.loss_scale = divisor  # divides before the norm, and multiplies no loss

    def step(self) -> tuple[float | HostRead, bool]:
        """Take both from the engine, which has read whether the norm is finite.

        The norm of a skipped update is infinite.
        """
        with nullcontext([False]) if self._skips else self._zero.without_overflow_check() as invalid:
            self._engine.step()
        if self._divisor != 1:
            self._divisor = self._optimizer.loss_scale = 1.0
        norm = math.inf if any(invalid) else self._engine.get_global_grad_norm()
        updated = not self._skips or self._engine.was_step_applied()
        return HostRead(norm) if isinstance(norm, Tensor) else float(norm), updated


class TorchClipping:
    """Stage 0: divide and clip in the torch optimizer's step hook, between DeepSpeed's all-reduce and the update.

    In fp32 DeepSpeed discards the norm, and in bf16 and fp16 it computes the norm of rounded gradients (DeepSpeed
    0.19.8, moe/utils.py, split_params_grads_into_shared_and_expert_params).
    """

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero = zero
        self._skips = zero.spec.skips
        self._max_norm: float | None = None
        self._divisor = 1.0
        self._outcome: tuple[float | HostRead, bool | None] = math.inf, False
        self._skip = DeviceSkip(zero.inner.optimizer)
        self._hooks = 3
        """How many hooks this package has on the torch optimizer: this one, and those of `FlatMasterWeights`."""
        self._overflows = zero.spec.precision.compute == "fp16"
        """Whether DeepSpeed's norm may overflow although ours is finite."""
        zero.inner.optimizer.register_step_pre_hook(self._before_update)

    def prepare(self, max_norm: float | None, divisor: float) -> None:
        """Store both for the hook."""
        self._max_norm, self._divisor = max_norm, divisor

    def step(self) -> tuple[float | HostRead, bool | None]:
        """Return what the hook found; it does not run if DeepSpeed skips the update."""
        self._outcome = math.inf, not self._skips
        self._zero.fill_gradients()
        # DeepSpeed takes the norm of gradients rounded to fp16, so it would skip a sum above 65504 that is finite in
        # fp32. An earlier check still skips what is not finite in fp32.
        with self._zero.without_overflow_check() if self._overflows else nullcontext():
            self._skipping = ExitStack()
            with self._skipping:
                self._zero.engine.step()
        return self._outcome

    def _norm(self) -> Tensor:
        """Of gradients that every rank has, and of slices, of which peers have the others. Collective with these."""
        by_peers: dict[Any, list[Tensor]] = {None: []}
        for parameter, master in self._zero.inner.full_masters.items():
            if master.grad is not None:
                part = slice_of(parameter)
                by_peers.setdefault(part and part.peers, []).append(master.grad)
        norm = norm_of(by_peers.pop(None))
        for peers, gradients in by_peers.items():
            square = norm_of(gradients).double().square()
            dist.all_reduce(square, group=peers)
            norm = (norm.double().square() + square).sqrt().float()
        return norm

    @torch.no_grad()
    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._divisor != 1:
            divide(gradients, self._divisor)
        norm = self._norm()
        value, updated = HostRead(norm), None if self._skips else True
        if self._skips and self._skip.possible(
            [each for each in parameters if each.grad is not None], norm, hooks=self._hooks
        ):
            self._skipping.enter_context(self._skip.unless_finite(norm))
        elif self._skips:
            updated = math.isfinite(value.get())
        self._outcome = value, updated
        if updated is False:
            for parameter in parameters:
                parameter.grad = None  # torch's optimizers skip parameters without a gradient
        elif self._max_norm is not None:
            clip_grads_with_norm_(parameters, self._max_norm, norm)
