"""What the adapters of FSDP2 and of DistributedDataParallel have in common: each has one `TorchGradients`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard.contract.kit.skipping import DeviceSkip
from unishard.distributed.host_read import HostRead
from unishard.distributed.shards import Shard
from unishard_fsdp.gradients.clipping import changes, scale, total_norm
from unishard_fsdp.sharding.local_shards import shard_of

_grad = attrgetter("grad")


class Stepper(Protocol):
    """Updates the parameters from `parameter.grad`."""

    def step(self) -> object:
        """Make one update."""


@final
class TorchGradients:
    """The gradients in `parameter.grad` of the parameters that train, and the update that a torch optimizer makes of
    them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        stepper: Stepper,
        *,
        steps_always: bool,
        copies: int,
        skip: DeviceSkip | None,
        own_hooks: int = 0,
        before_change: Callable[[], object] = lambda: None,
        masters: Mapping[nn.Parameter, Tensor] = MappingProxyType({}),
        others: Mapping[nn.Parameter, int] = MappingProxyType({}),
    ) -> None:
        """Of parameters that are sharded, or full on every rank.

        Args:
            parameters: All that train.
            device: Where this rank computes.
            stepper: The optimizer, or what steps it.
            steps_always: Whether an update with a gradient that is not finite is made, too.
            copies: Number of copies of each gradient over all ranks.
            skip: Skips updates on the device; None if the optimizer's steps are collective, or made in host memory.
            own_hooks: How many hooks this package has on the optimizer.
            before_change: Called before gradients are changed that are final.
            masters: The master weights of parameters that are no master weights themselves.
            others: The number for parameters of which there are more copies or fewer.
        """
        self.parameters = parameters
        self._device = device
        self._stepper = stepper
        self._steps_always = steps_always
        self._copies = copies
        self._skip = skip
        self._own_hooks = own_hooks
        self._before_change = before_change
        self._masters = masters
        self._others = others
        self._norm: Tensor | None = None
        """That of the gradients of this window, once it was asked for."""

    @torch.no_grad()
    def update(self, max_norm: float | None, divisor: float) -> tuple[HostRead, bool | None]:
        """Clip by the global norm, step, and drop the gradients, as `Updates.update` says; where the optimizer's
        kernels can skip on the device, without reading the norm. Collective.

        Args:
            max_norm: Clip the divided gradients to this norm; None for no clipping.
            divisor: Divide the gradients by this.
        """
        stepped, parts = self._gradients()
        norm, self._norm = self._norm, None
        norm = (total_norm(parts, self._device) if norm is None else norm) / divisor
        value, updated = HostRead(norm), True if self._steps_always else None
        on_device = (
            updated is None and self._skip is not None and self._skip.possible(stepped, norm, hooks=self._own_hooks)
        )
        scales = max_norm is not None or divisor != 1
        if updated is None and not on_device:
            updated = math.isfinite(value.get())
            scales = changes(value.get(), max_norm, divisor)
        if updated is not False:
            if scales:
                self._before_change()
                for _, some in parts:  # where shards are offloaded, on two devices
                    scale(some, norm, max_norm, divisor)
            with self._skip.unless_finite(norm) if self._skip is not None and on_device else nullcontext():
                self._stepper.step()
        for parameter in stepped:
            parameter.grad = None
        return value, updated

    def _gradients(self) -> tuple[list[nn.Parameter], list[tuple[int, list[Tensor]]]]:
        """The parameters that have a gradient, and this rank's part of each, as `total_norm` takes them."""
        stepped = [parameter for parameter in self.parameters if parameter.grad is not None]
        # Not `local`: a call for each parameter would count.
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in map(_grad, stepped)]
        if not self._others:
            return stepped, [(self._copies, parts)]
        by_copies: dict[int | None, list[Tensor]] = {None: []}
        for parameter, part in zip(stepped, parts, strict=True):
            by_copies.setdefault(self._others.get(parameter), []).append(part)
        return stepped, [(copies or self._copies, some) for copies, some in by_copies.items()]

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of the gradients, not divided, which `update` uses again. Collective."""
        if self._norm is None:
            _, parts = self._gradients()
            self._norm = total_norm(parts, self._device)
        return self._norm

    def shard(self, parameter: nn.Parameter, *, create: bool) -> Shard | None:
        """This rank's shard of a gradient, as `Updates.grad_shard` says."""
        if create:  # to be changed
            self._norm = None
            self._before_change()
        if parameter.grad is None:
            if not create:
                return None
            parameter.grad = torch.zeros_like(parameter, dtype=self._masters.get(parameter, parameter).dtype)
        return shard_of(parameter, parameter.grad)

    def drop(self) -> None:
        """Set all gradients to None."""
        self._norm = None
        for parameter in self.parameters:
            parameter.grad = None
