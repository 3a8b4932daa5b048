"""Gradients and parameters of a DeepSpeed engine, by the parameters of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unishard.config import Config
from unishard.distributed.shards import Shard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.patches import shards
from unishard_deepspeed.patches.optimizer_kind import kind_of, require

__all__ = ["Shards", "give_gradients"]


def give_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Stage 0: give parameters without a gradient one of zeros, in the format in which theirs are added up.

    DeepSpeed would make it in the parameter's own format, which torch then refuses (DeepSpeed 0.19.8, runtime/engine.py,
    _get_gradients_for_reduction).
    """
    for parameter in parameters:
        if parameter.grad is None and parameter.grad_dtype not in (None, parameter.dtype):
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


class Shards:
    """What a window's gradients and the masters are made of, on every stage."""

    def __init__(self, cfg: Config, engine: Any, inner: InnerOptimizer) -> None:
        self._engine = engine
        self._inner = inner
        self._kind = kind_of(cfg)
        self._offloads = cfg.offload.optimizer != "none"
        self._gradients: dict[nn.Parameter, Shard] | None = None
        """Of the window that is at its end."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients now instead of in `engine.step()`. Collective.

        Raises:
            BackendError: DeepSpeed has not the names for it.
        """
        require("gradients", self._kind)
        if self._kind == "stage-0":
            give_gradients(self._inner.trained)
        shards.reduce_gradients(self._engine)
        self._finish_copies()
        self._gradients = shards.gradient_parts(self._engine, self._inner, self._kind)

    def gradient(self, parameter: nn.Parameter) -> Shard | None:
        """After `reduce`: this rank's part of a gradient."""
        return None if self._gradients is None else self._gradients.get(parameter)

    def master(self, parameter: nn.Parameter) -> Shard:
        """This rank's part of a master.

        Raises:
            BackendError: DeepSpeed has not the names for it.
        """
        require("masters", self._kind)
        return shards.master_part(self._engine.optimizer, self._inner, parameter, self._kind)

    def refresh(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Bring the parameter up to its edited master."""
        shards.low_precision_copy(parameter, value, self._kind)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Inside, if `reduce` was called, `engine.step()` takes the gradients as they are now."""
        if self._gradients is None:
            yield
            return
        self._gradients = None
        if self._offloads:
            shards.measure_offloaded(self._engine.optimizer, self._inner, self._kind)
        with shards.already_reduced(self._engine):
            yield

    @torch.no_grad()
    def drop(self) -> None:
        """Forget the window.

        Raises:
            BackendError: DeepSpeed has not the names for it.
        """
        require("dropped", self._kind)
        self._gradients = None
        self._finish_copies()
        shards.drop_gradients(self._engine, self._kind)

    def _finish_copies(self) -> None:
        """Let gradients arrive in page-locked host memory, into which DeepSpeed copies them without waiting.

        (DeepSpeed 0.19.8, runtime/zero/stage3.py, _offload_grad_partition_at_boundary; runtime/zero/stage_1_and_2.py,
        async_inplace_copy_grad_to_fp32_buffer_from_gpu.)
        """
        if self._offloads and torch.cuda.is_available():
            torch.cuda.synchronize()
