"""The gradients of an accumulation window: reduced before its update, read and edited, or dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unishard.distributed.shards import Shard
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


class WindowGradients:
    """Shards of the window's gradients, at every stage."""

    def __init__(self, zero: ZeroOptimizer) -> None:
        self._zero = zero
        self._gradients: dict[nn.Parameter, Shard] | None = None
        """Gradient shards, once reduced in this window."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients before `engine.step()` does. Collective.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        self._zero.cases.gradients.require()
        self._zero.reduce_gradients()
        self._finish_copies()
        self._gradients = self._zero.gradient_shards()

    def shard(self, parameter: nn.Parameter) -> Shard | None:
        """This rank's shard of a gradient, after `reduce`."""
        return None if self._gradients is None else self._gradients.get(parameter)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """A block in which `engine.step()` uses the gradients as they are, if `reduce` was called."""
        if self._gradients is None:
            yield
            return
        self._gradients = None
        if self._zero.spec.offloads_optimizer:
            self._zero.measure_offloaded()
        with _already_reduced(self._zero.engine):
            yield

    @torch.no_grad()
    def drop(self) -> None:
        """Drop the window's gradients, and reset the count of backward calls.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        self._zero.cases.discard.require()
        self._gradients = None
        self._finish_copies()
        self._zero.engine.zero_grad()
        self._zero.engine._unmanaged_backward_count = 0
        self._zero.drop_shards()

    def _finish_copies(self) -> None:
        """Wait for gradients that DeepSpeed copies to pinned host memory asynchronously.

        (DeepSpeed 0.19.8, runtime/zero/stage3.py, _offload_grad_partition_at_boundary; runtime/zero/stage_1_and_2.py,
        async_inplace_copy_grad_to_fp32_buffer_from_gpu.)
        """
        if self._zero.spec.offloads_optimizer and torch.cuda.is_available():
            torch.cuda.synchronize()


@contextmanager
def _already_reduced(engine: Any) -> Iterator[None]:
    """A block in which `engine.step()` does not reduce again."""
    optimizer, reduces = engine.optimizer, engine.enable_backward_allreduce
    finishes = hasattr(optimizer, "finalize_gradient_accumulation_boundary")
    own = vars(optimizer).get("finalize_gradient_accumulation_boundary")  # `average_between`
    engine.enable_backward_allreduce = False
    if finishes:
        optimizer.finalize_gradient_accumulation_boundary = lambda: None
    try:
        yield
    finally:
        engine.enable_backward_allreduce = reduces
        if own is not None:
            optimizer.finalize_gradient_accumulation_boundary = own
        elif finishes:
            del optimizer.finalize_gradient_accumulation_boundary
