"""A torch optimizer's state in shards, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import StateSpec, fresh_state, tensors_and_numbers
from unishard.distributed.shards import Shard
from unishard_fsdp.clipping import local
from unishard_fsdp.shards import shard_of

__all__ = ["TorchOptimizerState"]


class TorchOptimizerState:
    """Reads optimizer state by model parameter, and recreates it."""

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: Mapping[nn.Parameter, Tensor]) -> None:
        """Hold the optimizer.

        Args:
            optimizer: The torch optimizer.
            stepped: Maps parameters to the tensors that it steps instead.
        """
        self._optimizer = optimizer
        self._stepped = stepped
        self._groups = {tensor: group for group in optimizer.param_groups for tensor in group["params"]}

    @torch.no_grad()
    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """This rank's shards of a parameter's state: live memory, and numbers as 0-d fp32 copies; empty if it holds
        nothing.
        """
        tensor = self._stepped.get(parameter, parameter)
        state = self._optimizer.state.get(tensor)
        if not state:
            return {}
        tensors, numbers = tensors_and_numbers(self._optimizer, self._groups[tensor], tensor, state)
        place = shard_of(parameter)
        found = {
            key: place._replace(values=local(value).view(place.shape if place.group is None else -1))
            for key, value in tensors.items()
        }
        return found | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    @torch.no_grad()
    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Clear all state and create it for some parameters; the others have none, as before their first update."""
        self._optimizer.state.clear()
        for parameter, spec in specs.items():
            tensor = self._stepped.get(parameter, parameter)
            if tensor in self._groups:  # ZeroRedundancyOptimizer distributes parameters over the ranks
                self._optimizer.state[tensor] = fresh_state(self._optimizer, self._groups[tensor], tensor, spec)
