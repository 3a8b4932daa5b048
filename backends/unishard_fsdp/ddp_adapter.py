"""The adapter of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unishard.config import Config
from unishard.errors import ContractError, ModelError
from unishard_fsdp import options
from unishard_fsdp.adapter import TorchAdapter
from unishard_fsdp.ddp import Averaging

__all__ = ["DDPAdapter"]


class DDPAdapter(TorchAdapter):
    """A model under DistributedDataParallel."""

    def __init__(
        self,
        cfg: Config,
        module: nn.Module,
        optimizer: Any,
        device: torch.device,
        *,
        native: options.DistributedDataParallel,
        wrap: Callable[[Averaging], DistributedDataParallel],
        owned: Sequence[nn.Parameter] | None = None,
    ) -> None:
        super().__init__(cfg, module, optimizer, device)
        self._owned = owned
        self._wrap = wrap
        self._averaging = Averaging()
        self._replica: DistributedDataParallel | None = wrap(self._averaging)
        self.forward_is_collective = native.forward_sync_buffers
        self._syncs_late = native.requires_gradient_sync == "last_micro_batch"
        self._without_sync = ExitStack()

    def begin(self, *, last: bool) -> None:
        """Skip the all-reduce unless this is the last micro-batch, where the config says so."""
        self._averaging.finished = False
        self._without_sync.close()
        if not last and self._syncs_late:
            self._without_sync.enter_context(self._running.no_sync())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Through DistributedDataParallel."""
        return self._running(*args, **kwargs)

    def finish_gradients(self) -> None:
        """Check that DDP has reduced every bucket.

        Raises:
            ModelError: The last backward left out parameters.
        """
        # A parameter without a gradient leaves its bucket unreduced; DDP itself says so only in the next forward (torch 2.13).
        if not self._averaging.finished:
            unused = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad and parameter.grad is None]
            raise ModelError(
                f"the last backward reached no gradient of {', '.join(unused) or 'some parameters'}, and DistributedDataParallel then "
                "reduces none of their bucket; name their class in sharding.conditional_modules, "
                "set native.fsdp.find_unused_parameters to true, or "
                "freeze them before prepare"
            )

    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[float, bool]:
        """Of gradients that DDP has averaged."""
        self.finish_gradients()
        return super().update(max_norm, divisor, finished=finished)

    def set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Wrap the model anew."""
        super().set_trainable(names, trainable)
        self._replica = None  # its reducer waits for the parameters that were trainable when it was built
        self._replica = self._wrap(self._averaging)

    def _class_name(self) -> str:
        # torch's own class, of which the one with fixed buckets is a kind.
        return next(kind.__name__ for kind in type(self._running).__mro__ if kind.__module__.startswith("torch."))

    def _masters(self) -> Sequence[nn.Parameter]:
        return self._trainable if self._owned is None else self._owned

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """That in a ZeroRedundancyOptimizer."""
        optimizer: torch.optim.Optimizer = self.optimizer if self._owned is None else self.optimizer.optim
        return optimizer

    def close(self) -> None:
        """End the reducer."""
        super().close()
        self._replica = None  # ends the reducer, and with it its hooks on the parameters

    @property
    def _running(self) -> DistributedDataParallel:
        if self._replica is None:
            raise ContractError("the engine is closed; prepare the model again")
        return self._replica
