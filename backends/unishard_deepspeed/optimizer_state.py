"""Optimizer state by model parameter, although it is stored by flat master weight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import StateSpec, fresh_state, tensors_and_numbers
from unishard.distributed.shards import Shard
from unishard_deepspeed.flat_master_weights import FlatMasterWeights, FlatShard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.kind import Kind
from unishard_deepspeed.private.master_weights import groups_of_masters
from unishard_deepspeed.private.state import unlink_states
from unishard_deepspeed.shards import Shards


class ZeroOptimizerState:
    """Reads optimizer state as shards, and recreates it."""

    def __init__(
        self, optimizer: Any, inner: InnerOptimizer, masters: FlatMasterWeights, access: Shards, kind: Kind
    ) -> None:
        """Hold the optimizers.

        Args:
            optimizer: DeepSpeed's optimizer.
            inner: The torch optimizer inside it.
            masters: The flat master weights of the torch optimizer, and how they are split.
            access: Returns this rank's shard of a master weight.
            kind: The kind of DeepSpeed optimizer.
        """
        self._optimizer = optimizer
        self._inner = inner
        self._torch = inner.optimizer
        self._masters = masters
        self._access = access
        self._kind = kind

    @cached_property
    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        return groups_of_masters(self._optimizer, self._inner, self._kind)

    @cached_property
    def _places(self) -> dict[nn.Parameter, tuple[Tensor, FlatShard]]:
        """The flat master weight and the shard of each parameter."""
        return {shard.parameter: (master, shard) for master, shards in self._masters.shards.items() for shard in shards}

    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """This rank's shards of a parameter's state: live memory, and numbers as 0-d fp32 copies; empty if it holds
        nothing.
        """
        held = self._access.master(parameter)
        if parameter not in self._places or not held.values.numel():
            return {}
        master, shard = self._places[parameter]
        tensor, start = self._masters.stepped_tensor(master, shard)
        tensors, numbers = tensors_and_numbers(
            self._torch, self._groups[master], tensor, self._torch.state.get(tensor, {})
        )
        # At stage 3 a shard ends in padding, which does not belong to the parameter.
        intervals = {
            key: value if held.group is None else value.narrow(0, start, held.values.numel())
            for key, value in tensors.items()
        }
        shards = {key: held._replace(values=values) for key, values in intervals.items()}
        return shards | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Clear all state and create it for some parameters; the others have none, as before their first update."""
        unlink_states(self._inner, self._kind)
        self._masters.forget()
        for master, parts in self._masters.shards.items():
            wanted = [specs.get(shard.parameter) for shard in parts]
            if any(spec != wanted[0] for spec in wanted):
                self._make_split(master, wanted)
            elif wanted[0] is not None:
                self._torch.state[master] = fresh_state(self._torch, self._groups[master], master, wanted[0])

    def _make_split(self, master: Tensor, wanted: list[StateSpec | None]) -> None:
        for view, spec in zip(self._masters.split(master), wanted, strict=True):
            if spec is not None:
                self._torch.state[view] = fresh_state(self._torch, self._groups[master], view, spec)
        self._masters.gather_state(master)
