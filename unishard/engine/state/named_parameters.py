"""Find parameters by name on all ranks, and write rank 0's values into them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import ShardedModel
from unishard.distributed.shards import Shard, copy_dtype, write_shard
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.state.tensors import StateTensors
from unishard.errors import ContractError


class NamedParameters:
    """The parameters of a prepared model by the user's names."""

    def __init__(self, adapter: ShardedModel, order: CallOrder, tensors: StateTensors) -> None:
        self._adapter = adapter
        self._device = adapter.device
        self._order = order
        self._tensors = tensors

    def find(self, call: str, name: str) -> nn.Parameter:
        """Find a parameter by name, and check that all ranks make the same call. Collective.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
            RankMismatchError: Another rank makes another call.
        """
        parameter = self._known(call, name)
        self._order.ranks.check_now(call, f", {name}")
        return parameter

    def find_all(self, call: str, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Find parameters by name, in the order of the model, and check that all ranks make the same call. Collective.

        Raises:
            ContractError: There is no such parameter, `names` is a single name, or the engine is closed.
            RankMismatchError: Another rank makes another call.
        """
        if isinstance(names, str):
            raise ContractError(f"{call} needs a list of names, got {names!r}; write {call}([{names!r}])")
        asked = {name: self._known(call, name) for name in names}
        parameters = {name: asked[name] for name in self._tensors.named if name in asked}
        all_names = ", ".join(parameters)
        self._order.ranks.check_sampled(
            call,
            f", {all_names}"
            if len(parameters) < 3
            else f", {len(parameters)} parameters ({zlib.crc32(all_names.encode()):08x})",
        )
        return parameters

    def _known(self, call: str, name: str) -> nn.Parameter:
        self._order.require_open(call)
        named = self._tensors.named
        if name in named:
            return named[name]
        near = get_close_matches(str(name), named, 3) or [known for known in named if str(name) in known][:3]
        hint = (
            f"did you mean {' or '.join(near)}?" if near else f"the first of {len(named)} are {', '.join([*named][:3])}"
        )
        raise ContractError(f"{call}: the model has no parameter {name!r}; {hint}")

    def replace(self, call: str, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        """Write rank 0's value into a master weight and into every copy of it. Collective."""
        shard = self._adapter.master_shard(parameter)
        full = from_first_rank(call, name, shard, value, self._device)
        write_shard(shard, full)
        self._order.place.wrote()
        self._adapter.weights_written({parameter: full})


def from_first_rank(call: str, name: str, shard: Shard, value: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's value as a new full tensor in `copy_dtype`. Collective.

    Raises:
        ContractError: `value` does not have the tensor's shape, or is neither floating-point nor, for a complex
            parameter, complex.
    """
    dtype = copy_dtype(shard.values)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or (value.is_complex() and dtype.is_complex)):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ContractError(
            f"{call}: {name} needs a {'complex' if dtype.is_complex else 'floating-point'} tensor, got {kind}"
        )
    if value.shape != shard.shape:
        raise ContractError(f"{call}: {name} has the shape {tuple(shard.shape)}, got {tuple(value.shape)}")
    full = torch.empty(shard.shape, dtype=dtype, device=device).copy_(value)
    if dist.get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full
