"""The base of the torch adapters; `fsdp_adapter` is for FSDP2, `ddp_adapter` for DistributedDataParallel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard.contract.adapter import EngineAdapter
from unishard.contract.results import Placement
from unishard.distributed.dtypes import name_of
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard
from unishard.engine.optim.skipping import DeviceSkip
from unishard_fsdp.clipping import scale, total_norm
from unishard_fsdp.shards import local, shard_of
from unishard_fsdp.spec import FSDPSpec

_grad = attrgetter("grad")


class TorchAdapter(EngineAdapter):
    """The base of the adapters for torch's forms of data parallelism."""

    _copies: int
    """Number of copies of each gradient over all ranks."""

    def __init__(self, spec: FSDPSpec, module: nn.Module, optimizer: Any, device: torch.device) -> None:
        super().__init__(module, device, optimizer)
        self._steps_always = spec.steps_always
        self._named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._trainable = [*self._named.values()]
        self._skippable: Collection[Tensor] = ()
        """Parameters that any rank may skip."""
        self._copies = dist.get_world_size()
        self._skip: DeviceSkip | None = DeviceSkip(optimizer)
        """None if the optimizer's steps are collective, or made in host memory."""
        self._own_hooks = 0
        """How many hooks this package has on the optimizer."""
        self._norm: Tensor | None = None
        """That of the gradients of this window, once it was asked for."""
        self._last = True  # torch's default: each backward ends a window

    def backward(self, loss: Tensor) -> None:
        """Run autograd, with the engine's hooks."""
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(self, max_norm: float | None, divisor: float, *, finished: bool) -> tuple[HostRead, bool | None]:
        """Clip by the global norm, and step the torch optimizer; where its kernels can skip on the device, without
        reading the norm.
        """
        stepped, gradients = self._gradients()
        norm, self._norm = self._norm, None
        norm = (total_norm(gradients, self.device, copies=self._copies) if norm is None else norm) / divisor
        value, updated = HostRead(norm), True if self._steps_always else None
        on_device = (
            updated is None and self._skip is not None and self._skip.possible(stepped, norm, hooks=self._own_hooks)
        )
        if updated is None and not on_device:
            updated = math.isfinite(value.get())
        if updated is not False:
            scale(gradients, norm, max_norm, divisor)
            with self._skip.unless_finite(norm) if self._skip is not None and on_device else nullcontext():
                self._step()
        for parameter in stepped:
            parameter.grad = None
        return value, updated

    def _gradients(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """The parameters that have a gradient, and this rank's part of each."""
        stepped = [parameter for parameter in self._trainable if parameter.grad is not None]
        # Not `local`: a call for each parameter would count.
        return stepped, [each.to_local() if isinstance(each, DTensor) else each for each in map(_grad, stepped)]

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of the gradients, which `update` uses again."""
        if self._norm is None:
            self._norm = total_norm(self._gradients()[1], self.device, copies=self._copies)
        return self._norm

    def _step(self) -> None:
        self.optimizer.step()

    @torch.no_grad()
    def placement(self) -> Placement:
        """Report what the engine holds, from its live tensors."""
        masters = [local(parameter) for parameter in self._masters()]
        return Placement(
            engine=self._class_name(),
            units=self._units(),
            master_dtypes=frozenset(name_of(master.dtype) for master in masters),
            master_numel=sum(master.numel() for master in masters),
            param_bytes=sum(local(parameter).nbytes for parameter in self.module.parameters()),
        )

    @abstractmethod
    def _class_name(self) -> str:
        """Class that runs the model."""

    def _units(self) -> tuple[str, ...]:
        return ()

    def _masters(self) -> Sequence[nn.Parameter]:
        """The trainable parameters that this rank updates."""
        return self._trainable

    def shared_parameters(self) -> Mapping[str, nn.Parameter]:
        """All that were trainable in `prepare`, but those of conditional modules."""
        return {name: each for name, each in self._named.items() if each not in self._skippable}

    def without_gradient(self) -> Collection[str]:
        """Those whose `.grad` is None."""
        missing = [name for name, parameter in self._named.items() if parameter.grad is None]
        shared = self.shared_parameters() if missing else {}
        return [name for name in missing if name in shared]

    def finish_gradients(self) -> None:
        """Do nothing: the last backward of a window has reduced them."""

    def grad_shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """`parameter.grad`."""
        if create:  # to be changed
            self._norm = None
        if parameter.grad is None:
            if not create:
                return None
            parameter.grad = torch.zeros_like(parameter)
        return shard_of(parameter, parameter.grad)

    def master_shard(self, parameter: nn.Parameter) -> Shard:
        """The parameter itself."""
        return shard_of(parameter)

    def refresh(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Do nothing: there is one copy, unless a subclass keeps another."""

    def drop_gradients(self) -> None:
        """Set gradients to None."""
        self._norm = None
        for parameter in self._trainable:
            parameter.grad = None

    def close(self) -> None:
        """Free the gradients; torch's hooks stay with the module."""
        for parameter in self._trainable:
            parameter.grad = None
