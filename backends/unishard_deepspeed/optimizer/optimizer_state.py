"""Optimizer state by model parameter, although it is stored by flat master weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import StateSpec, fresh_state, tensors_and_numbers
from unishard.distributed.shards import Shard
from unishard_deepspeed.masters.flat_master_weights import FlatMasterWeights
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


class ZeroOptimizerState:
    """Reads optimizer state as shards, and recreates it."""

    def __init__(self, zero: ZeroOptimizer, masters: FlatMasterWeights, drop_gradients: Callable[[], None]) -> None:
        """Hold the optimizers.

        Args:
            zero: DeepSpeed's.
            masters: The flat master weights of the torch optimizer inside it, and how they are split.
            drop_gradients: Drops what DeepSpeed keeps of a window, also of one whose update has failed.
        """
        self._zero, self._drop_gradients = zero, drop_gradients
        self._torch = zero.inner.optimizer
        self._masters = masters

    @cached_property
    def _groups(self) -> dict[Tensor, dict[str, Any]]:
        return self._zero.groups_of_masters()

    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """This rank's shards of a parameter's state: live memory, and numbers as 0-d fp32 copies; empty if it holds
        nothing.
        """
        held = self._zero.master_shard(parameter)
        if parameter not in self._masters.masters or not held.values.numel():
            return {}
        master, (tensor, start) = self._masters.masters[parameter], self._masters.stepped_tensor(parameter)
        tensors, numbers = tensors_and_numbers(
            self._torch, self._groups[master], tensor, self._torch.state.get(tensor, {})
        )
        # At stage 3 a shard ends in padding, which does not belong to the parameter.
        intervals = {
            key: value if held.group is None else value.view(-1).narrow(0, start, held.values.numel())
            for key, value in tensors.items()
        }
        shards = {key: held._replace(values=values) for key, values in intervals.items()}
        return shards | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Clear all state and create it for some parameters; the others have none, as before their first update."""
        self._drop_gradients()
        self._zero.unlink_states()
        self._masters.forget()
        for master, parts in self._masters.shards.items():
            wanted = [specs.get(parameter) for parameter in parts]
            if any(spec != wanted[0] for spec in wanted):
                self._make_split(master, wanted)
            elif wanted[0] is not None:
                self._torch.state[master] = fresh_state(self._torch, self._groups[master], master, wanted[0])
        self._zero.link_states(now=True)

    def _make_split(self, master: Tensor, wanted: list[StateSpec | None]) -> None:
        for view, spec in zip(self._masters.split(master).values(), wanted, strict=True):
            if spec is not None:
                self._torch.state[view] = fresh_state(self._torch, self._groups[master], view, spec)
        self._masters.gather_state(master)
