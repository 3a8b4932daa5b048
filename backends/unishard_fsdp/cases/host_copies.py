"""Step an optimizer on copies in host memory, unit by unit: while one is updated, the next ones come down, and those
before go up.

```text
reducing stream  | gradients, where the backward of each unit ends |
stream down                                                        | 1 | 2 | 3 |
host                                                                   | update 1 | update 2 | update 3 |
stream up                                                                         |    1     |    2     | 3 |
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.kit.replicated import is_replicated
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard_fsdp.cases.early_gradients import EarlyGradients
from unishard_fsdp.cases.step_hooks import StepHooks
from unishard_fsdp.gradients.stepped_shards import SteppedShards
from unishard_fsdp.sharding.local_shards import local

Groups = list[dict[str, Any]]
"""Of an optimizer."""


class HostCopies(SteppedShards):
    """Copies in host memory, while parameters stay on the device, which FSDP2's own offload does not support.

    The parameters stay the master weights: each step starts from their current values, so edits take effect. At its end
    the computing stream waits for the copies back, so whatever is queued behind it reads new weights.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Mapping[nn.Parameter, Tensor],
        device: torch.device,
        units: Sequence[Sequence[nn.Parameter]],
        *,
        pin_memory: bool,
    ) -> None:
        """Copy the parameters, and move the state.

        Args:
            optimizer: Has not stepped yet.
            masters: The master weights of parameters that are no master weights themselves.
            device: Where the parameters are.
            units: Parameters that are updated together, in the order of updates.
            pin_memory: Whether host memory is page-locked, without which each copy waits until it is done.
        """
        self._pin_memory = pin_memory
        self._device = torch.get_device_module(device)
        self._down, self._up = self._device.Stream(), self._device.Stream()
        self._in_parts = not isinstance(optimizer, ShardOptimizer)
        self._hooks = StepHooks(optimizer)
        super().__init__(optimizer, masters)
        numbers = {each: number for number, unit in enumerate(units) for each in unit}  # a shared one is in several
        self._unit_of = {tensor: numbers.get(parameter, 0) for parameter, tensor in self.tensors.items()}
        self._units: list[list[nn.Parameter]] = [[] for _ in units]
        for parameter, tensor in self.tensors.items():
            self._units[self._unit_of[tensor]].append(parameter)
        self._arrivals: list[Any] = []
        """By unit, the event after which its copies are in host memory."""
        trained = [each for each in self.tensors if each.requires_grad and not is_replicated(each)]
        self.gradients = EarlyGradients(trained if pin_memory else (), self._empty)

    def before_change(self) -> None:
        """Drop the copies that were made early."""
        self.gradients.change()

    def _update(self) -> None:
        """Update by units, with as many calls of the optimizer's step.

        An optimizer that sends shards gets all in one call. So do hooks of the user's, which see them all.
        """
        watched = self._hooks.of_others()
        if watched:  # and they may change gradients
            self.before_change()
        if self._in_parts and not watched:
            self._update_by_unit()
        else:
            self.optimizer.step()

    @torch.no_grad()
    def _update_by_unit(self) -> None:
        groups: Groups = self.optimizer.param_groups
        self._stays = True
        self._enter()
        try:
            for number, own in self._by_unit(groups).items():
                self._wait_for(number)
                self.optimizer.param_groups = own
                self.optimizer.step()
                self._send(number)
        finally:
            self.optimizer.param_groups = groups

    def _by_unit(self, groups: Groups) -> dict[int, Groups]:
        """The groups with the tensors of each unit that have a gradient, in the order of units."""
        found: dict[int, Groups] = {number: [] for number in range(len(self._units))}
        for group in groups:
            own: defaultdict[int, list[Tensor]] = defaultdict(list)
            for tensor in group["params"]:
                if tensor.grad is not None:
                    own[self._unit_of[tensor]].append(tensor)
            for number, tensors in own.items():
                found[number].append(group | {"params": tensors})
        return {number: own for number, own in found.items() if own}

    def _new(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = self._weights(parameter)
        copy = nn.Parameter(self._empty(shard).copy_(shard))
        vars(copy).update(vars(parameter))
        return copy

    def _moved(self, value: Tensor) -> Tensor:
        return local(value).to("cpu", copy=True)

    def _read(self) -> None:
        """Queue the copies down, unit by unit; wait for them where the optimizer gets all."""
        self._down.wait_stream(self._device.current_stream())
        self._arrivals = []
        with self._device.stream(self._down):
            for unit in self._units:
                for parameter in unit:
                    self._read_one(parameter, self.tensors[parameter])
                self._arrivals.append(self._down.record_event())
        for number in range(0 if self._stays else len(self._units)):
            self._wait_for(number)

    def _read_one(self, parameter: nn.Parameter, copy: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        copy.data.copy_(self._weights(parameter), non_blocking=self._pin_memory)
        copy.grad = self.gradients.copy_of(parameter)
        if copy.grad is None:
            gradient = local(parameter.grad)
            copy.grad = self._empty(gradient).copy_(gradient, non_blocking=self._pin_memory)

    def _wait_for(self, number: int) -> None:
        """Let the host wait for the copies of a unit."""
        event = self._arrivals[number]
        if event is not None:  # the CPU's streams have none
            event.synchronize()

    def _send(self, number: int) -> None:
        """Queue the copies up of a unit: behind what has read the parameters, for which the host has waited."""
        with self._device.stream(self._up):
            for parameter in self._units[number]:
                copy = self.tensors[parameter]
                if copy.grad is not None:
                    self._weights(parameter).copy_(copy, non_blocking=self._pin_memory)
                    if parameter in self.masters:
                        parameter.data.copy_(self.masters[parameter])
                    copy.grad = None

    def _write(self) -> None:
        """Queue those that are left, and let the computing stream wait for all."""
        for number in range(len(self._units)):
            self._send(number)
        self._device.current_stream().wait_stream(self._up)

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._pin_memory)
