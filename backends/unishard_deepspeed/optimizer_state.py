"""The state of the user's optimizer by the parameters of the model, though it is kept by flat masters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard.engine.optim.optimizer_state import StateSpec, fresh_state, tensors_and_numbers
from unishard_deepspeed.flat_master_weights import FlatMasterWeights, FlatShard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.patches.optimizer_kind import Kind
from unishard_deepspeed.patches.state import forget_states, groups_of_masters
from unishard_deepspeed.shards import Shards

__all__ = ["OptimizerState"]


class OptimizerState:
    """Reads the state in shards, and makes it anew."""

    def __init__(self, optimizer: Any, inner: InnerOptimizer, masters: FlatMasterWeights, access: Shards, kind: Kind) -> None:
        """Remember where to look.

        Args:
            optimizer: DeepSpeed's.
            inner: The torch optimizer inside it.
            masters: Of the torch optimizer, and how they are split.
            access: Says what this rank holds of a master.
            kind: Of the optimizer.
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
        """Where each parameter lies."""
        return {piece.parameter: (master, piece) for master, pieces in self._masters.pieces.items() for piece in pieces}

    def shards(self, parameter: nn.Parameter) -> dict[str, Shard]:
        """What this rank holds of a parameter's state: live memory, and numbers as 0-d fp32 copies; empty where it holds nothing."""
        held = self._access.master(parameter)
        if parameter not in self._places or not held.values.numel():
            return {}
        master, piece = self._places[parameter]
        tensor, start = self._masters.stepped(master, piece)
        tensors, numbers = tensors_and_numbers(self._torch, self._groups[master], tensor, self._torch.state.get(tensor, {}))
        # At stage 3 a piece ends in padding, which is no part of the parameter.
        stretches = {key: value if held.group is None else value.narrow(0, start, held.values.numel()) for key, value in tensors.items()}
        found = {key: held._replace(values=values) for key, values in stretches.items()}
        return found | {key: Shard(torch.Size(()), number) for key, number in numbers.items()}

    def make(self, specs: Mapping[nn.Parameter, StateSpec]) -> None:
        """Forget all state and make that of some parameters anew; the others have none, as before their first update."""
        forget_states(self._inner, self._kind)
        self._masters.forget()
        for master, pieces in self._masters.pieces.items():
            wanted = [specs.get(piece.parameter) for piece in pieces]
            if any(spec != wanted[0] for spec in wanted):
                self._make_split(master, wanted)
            elif wanted[0] is not None:
                self._torch.state[master] = fresh_state(self._torch, self._groups[master], master, wanted[0])

    def _make_split(self, master: Tensor, wanted: list[StateSpec | None]) -> None:
        for view, spec in zip(self._masters.split(master), wanted, strict=True):
            if spec is not None:
                self._torch.state[view] = fresh_state(self._torch, self._groups[master], view, spec)
        self._masters.gather_state(master)
