"""The state of a torch optimizer in shards, as a checkpoint reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard.engine.optim.optimizer_state import StateSpec, fresh_state, tensors_and_numbers
from unishard_fsdp.clipping import local
from unishard_fsdp.shards import shard_of

__all__ = ["OptimizerState"]


class OptimizerState:
    """Reads what an optimizer keeps by the parameters of the model, and makes it anew."""

    def __init__(self, optimizer: torch.optim.Optimizer, stepped: Mapping[nn.Parameter, Tensor]) -> None:
        """Nothing is read yet.

        Args:
            optimizer: Steps what is in its groups.
            stepped: What it steps for each parameter, where that is not the parameter itself.
        """
        self._optimizer = optimizer
        self._stepped = stepped
        self._groups = {held: group for group in optimizer.param_groups for held in group["params"]}

    @torch.no_grad()
    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """What this rank holds of a parameter's state: live memory, and numbers as 0-d fp32 copies; empty where it holds nothing."""
        held = self._stepped.get(parameter, parameter)
        state = self._optimizer.state.get(held)
        if not state:
            return {}
        tensors, numbers = tensors_and_numbers(self._optimizer, self._groups[held], held, state)
        place = shard_of(parameter)
        found = {
            key: place._replace(values=local(value) if place.group is None else local(value).view(-1)) for key, value in tensors.items()
        }
        return found | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    @torch.no_grad()
    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Forget all state and make that of some parameters anew; the others have none, as before their first update."""
        self._optimizer.state.clear()
        for parameter, spec in specs.items():
            held = self._stepped.get(parameter, parameter)
            if held in self._groups:  # ZeroRedundancyOptimizer divides the parameters between the ranks
                self._optimizer.state[held] = fresh_state(self._optimizer, self._groups[held], held, spec)
