"""Gradients and parameters by name, with the same meaning on every engine.

The adapter returns each rank's shard of a tensor; this module builds full tensors, norms and edits from shards.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import InferenceAdapter
from unishard.distributed.shards import Shard, copy_dtype, full_tensor, shard_norms, write_shard
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.inference_mode import without_inference_mode
from unishard.engine.state.tensors import StateTensors
from unishard.errors import ContractError


class ParameterAccess:
    """Reads and edits master weights. Public methods implement those of `Engine` with the same names."""

    def __init__(self, adapter: InferenceAdapter, order: CallOrder, tensors: StateTensors) -> None:
        self._adapter = adapter
        self._device = adapter.device
        self._order = order
        self._tensors = tensors

    @torch.no_grad()
    def parameter(self, name: str) -> Tensor:
        """A full copy of a master weight in fp32, or complex64 if it is complex."""
        return full_tensor(self._adapter.master_shard(self.find("parameter", name)), self._device)

    @torch.no_grad()
    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with."""
        parameter = self.find("set_parameter", name)
        self._order.require_no_graph("set_parameter")
        self.replace("set_parameter", name, parameter, value)

    @without_inference_mode
    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Edit several master weights, which are written back on exit."""
        if isinstance(names, str):
            raise ContractError(f"gathered needs a list of names, got {names!r}; write gathered([{names!r}])")
        found = {name: self.find("gathered", name) for name in names}
        self._order.require_no_graph("gathered")
        full: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for parameter in found.values():
                if parameter not in full:
                    full[parameter] = full_tensor(self._adapter.master_shard(parameter), self._device)
        tensors = {name: full[parameter] for name, parameter in found.items()}
        yield tensors
        self._order.require_no_graph("gathered")
        if tensors.keys() != found.keys():
            raise ContractError("gathered: names were added to or removed from the dict; only edit its tensors")
        edited = {parameter: name for name, parameter in found.items() if tensors[name] is not full[parameter]}
        names_of = {parameter: name for name, parameter in found.items()} | edited
        self._order.check_now("gathered", ", writing back")
        with torch.no_grad():
            for parameter, name in names_of.items():
                self.replace("gathered", name, parameter, tensors[name])

    @torch.no_grad()
    def parameter_norms(self) -> dict[str, float]:
        """The norm of each master weight by name."""
        self._order.check_now("parameter_norms")
        return shard_norms(
            {name: self._adapter.master_shard(parameter) for name, parameter in self._tensors.each()}, self._device
        )

    def find(self, call: str, name: str) -> nn.Parameter:
        """Find a parameter by name, and check that all ranks make the same call. Collective.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
            RankMismatchError: Another rank makes another call.
        """
        parameter = self._known(call, name)
        self._order.check_now(call, f", {name}")
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
        found = {name: asked[name] for name in self._tensors.named if name in asked}
        all_names = ", ".join(found)
        self._order.check_sampled(
            call,
            f", {all_names}" if len(found) < 3 else f", {len(found)} parameters ({zlib.crc32(all_names.encode()):08x})",
        )
        return found

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
        self._order.writes += 1
        self._adapter.refresh(parameter, full)


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
