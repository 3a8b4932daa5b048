"""Shards of a DeepSpeed engine's gradients and master weights, by model parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.private import shards, window
from unishard_deepspeed.private.requirements import require
from unishard_deepspeed.private.state import gather_after
from unishard_deepspeed.spec import ZeroSpec


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Stage 0: create zero gradients in fp32 for parameters without one that accumulate in fp32.

    DeepSpeed would create them in the parameter's dtype, and reduce them apart from those of ranks that used the
    parameter (DeepSpeed 0.19.8, runtime/engine.py, _get_gradients_for_reduction).
    """
    for parameter in parameters:
        if parameter.grad is None and parameter.grad_dtype is None:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)


class Shards:
    """Shards of a window's gradients and of the master weights, at every stage."""

    def __init__(self, spec: ZeroSpec, engine: Any, inner: InnerOptimizer) -> None:
        self._engine = engine
        self._inner = inner
        self._kind = spec.kind
        self._offloads = spec.offloads_optimizer
        self._gradients: dict[nn.Parameter, Shard] | None = None
        """Gradient shards, once reduced in this window."""
        self._required = False

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients before `engine.step()` does. Collective.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        if not self._required:
            require("gradients", self._kind)
            self._required = True
        if self._kind == "stage-0":
            give_gradients(self._inner.trained)
        window.reduce_gradients(self._engine)
        self._finish_copies()
        self._gradients = shards.gradient_shards(self._engine, self._inner, self._kind)

    def gradient(self, parameter: nn.Parameter) -> Shard | None:
        """This rank's shard of a gradient, after `reduce`."""
        return None if self._gradients is None else self._gradients.get(parameter)

    def master(self, parameter: nn.Parameter) -> Shard:
        """This rank's shard of a master weight.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        require("master-weights", self._kind)
        return shards.master_shard_of(self._engine.optimizer, self._inner, parameter, self._kind)

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Update a parameter to its edited master weight."""
        shards.update_low_precision_copy(parameter, value, self._kind)
        gather_after(self._engine.optimizer, self._kind)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """A block in which `engine.step()` uses the gradients as they are, if `reduce` was called."""
        if self._gradients is None:
            yield
            return
        self._gradients = None
        if self._offloads:
            shards.measure_offloaded(self._engine.optimizer, self._inner, self._kind)
        with window.already_reduced(self._engine):
            yield

    @torch.no_grad()
    def drop(self) -> None:
        """Drop the window's gradients.

        Raises:
            BackendError: DeepSpeed lacks a private name for it.
        """
        require("discard", self._kind)
        self._gradients = None
        self._finish_copies()
        window.drop_gradients(self._engine, self._kind)

    def _finish_copies(self) -> None:
        """Wait for gradients that DeepSpeed copies to pinned host memory asynchronously.

        (DeepSpeed 0.19.8, runtime/zero/stage3.py, _offload_grad_partition_at_boundary; runtime/zero/stage_1_and_2.py,
        async_inplace_copy_grad_to_fp32_buffer_from_gpu.)
        """
        if self._offloads and torch.cuda.is_available():
            torch.cuda.synchronize()
