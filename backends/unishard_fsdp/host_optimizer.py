"""Step an optimizer in host memory while parameters stay on the device, which FSDP2's own offload does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unishard_fsdp.shards import local


class HostCopies:
    """Host copies of parameters, which an optimizer steps instead of them.

    The parameters stay the master weights: each step starts from their current values, so edits take effect.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, pin_memory: bool) -> None:
        """Move an optimizer that has not stepped yet, with the state that it may have created when it was
        constructed.
        """
        self._pin_memory = pin_memory
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        state = dict(optimizer.state)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [self._copy_of(parameter) for parameter in group["params"]]
        for parameter, values in state.items():
            optimizer.state[self._copies[parameter]] = _host_copies(values)  # type: ignore[index]  # torch calls its keys tensors
        self._optimizer = optimizer

    @property
    def stepped(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The host copy of each parameter."""
        return self._copies

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their gradients. Not collective."""
        for parameter, copy in self._copies.items():
            copy.data.copy_(local(parameter), non_blocking=self._pin_memory)
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                copy.grad = self._empty(gradient).copy_(gradient, non_blocking=self._pin_memory)
        if self._pin_memory:
            torch.cuda.current_stream().synchronize()
        self._optimizer.step()
        for parameter, copy in self._copies.items():
            if copy.grad is not None:
                local(parameter).copy_(copy, non_blocking=self._pin_memory)
                copy.grad = None

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        with torch.no_grad():
            shard = local(parameter)
            copy = nn.Parameter(self._empty(shard).copy_(shard))
        vars(copy).update(vars(parameter))
        self._copies[parameter] = copy
        return copy

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._pin_memory)


def _host_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {
            name: local(value).to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
