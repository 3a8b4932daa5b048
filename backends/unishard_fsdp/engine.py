"""What the running engines of torch have in common; `fsdp_engine` has FSDP2, `ddp_engine` DistributedDataParallel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.config import Config
from unishard.distributed.shards import Shard
from unishard.engine import TrainingEngine
from unishard.engine.optim.optimizer_state import StateSpec
from unishard.plugins.backend import Placement
from unishard_fsdp.clipping import local, scale, total_norm
from unishard_fsdp.optimizer_state import OptimizerState
from unishard_fsdp.shards import shard_of

__all__ = ["TorchEngine"]


class TorchEngine(TrainingEngine):
    """What torch's forms of data parallelism have in common."""

    _copies: int
    """How often all ranks together hold each gradient."""

    def __init__(self, cfg: Config, module: nn.Module, optimizer: Any, device: torch.device) -> None:
        super().__init__(cfg, module, optimizer, device)
        self._trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._copies = dist.get_world_size()
        self._last = True  # torch's own default: each backward ends a window

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _update(self, max_norm: float | None, divisor: float) -> tuple[float, bool]:
        gradients = [local(parameter.grad) for parameter in self._trainable if parameter.grad is not None]
        norm = total_norm(gradients, self._device, copies=self._copies) / divisor
        value = float(norm)
        updated = math.isfinite(value) or self._cfg.training.nonfinite == "ignore"
        if updated:
            scale(gradients, norm, max_norm, divisor)
            self._step()
        for parameter in self._trainable:
            parameter.grad = None
        return value, updated

    def _step(self) -> None:
        self._optimizer.step()

    @torch.no_grad()
    def placement(self) -> Placement:
        """What the engine really holds, read off its live tensors."""
        masters = [local(parameter) for parameter in self._masters()]
        return Placement(
            engine=self._class_name(),
            units=self._units(),
            master_dtypes=frozenset(str(master.dtype).removeprefix("torch.") for master in masters),
            master_numel=sum(master.numel() for master in masters),
            param_bytes=sum(local(parameter).nbytes for parameter in self._module.parameters()),
        )

    def _stepping(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._optimizer
        return optimizer

    @cached_property
    def _state(self) -> OptimizerState:
        return OptimizerState(self._stepping(), self._stepped())

    def _stepped(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """What the optimizer steps in the place of parameters."""
        return {}

    def _settle_state(self) -> None:
        """Nothing is gathered, unless a subclass gathers."""

    def _optimizer_parts(self, parameter: nn.Parameter) -> dict[str, Shard]:
        return self._state.parts(parameter)

    def _make_optimizer_state(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        self._state.make(specs)

    def _state_loaded(self) -> None:
        """There is one copy of everything."""

    @abstractmethod
    def _class_name(self) -> str:
        """Class that runs the model."""

    def _units(self) -> tuple[str, ...]:
        return ()

    def _masters(self) -> Sequence[nn.Parameter]:
        """The trainable parameters that this rank updates."""
        return self._trainable

    def _finish_gradients(self) -> None:
        """Backward has reduced them: its last one in a window always does."""

    def _gradient_part(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        if parameter.grad is None:
            if not create:
                return None
            parameter.grad = torch.zeros_like(parameter)
        return shard_of(parameter.grad)

    def _master_part(self, parameter: nn.Parameter) -> Shard:
        return shard_of(parameter)

    def _refresh(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """There is one copy, unless a subclass keeps another."""

    def _drop_gradients(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None

    def _release(self) -> None:
        for parameter in self._trainable:
            parameter.grad = None
