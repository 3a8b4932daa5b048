"""The units whose activations go to host memory, and what goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from unishard.config import Sharding
from unishard.contract.kit.forwards import is_compiled, recomputes
from unishard.contract.units import Unit
from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.model.activation_checkpointing import refuse_own_recomputation
from unishard.engine.model.activation_offload.saved import OfWeight, OnDevice
from unishard.engine.model.activation_offload.store import ActivationStore
from unishard.engine.model.activation_offload.unit_graphs import OnHost, UnitGraph, UnitGraphs
from unishard.engine.model.activation_offload.weights import PlacedWeights
from unishard.engine.model.units import find_blocks

_FIELD = "offload.activations"
SMALL = 2**16
"""Bytes of a storage up to which it stays: a copy takes longer than the device needs to compute with it."""
_PARTS = 16
"""By how much a storage may exceed a view of it that is saved: a sample of a data set must not move all of it."""


def find(model: nn.Module, asked: str, sharding: Sharding, recomputed: Sequence[Unit]) -> list[Unit]:
    """Find the modules whose activations are offloaded: the blocks, and what recomputes its forward around some.

    Args:
        model: Any module, not yet sharded.
        asked: `offload.activations`.
        sharding: The section; `units` defines the blocks.
        recomputed: Modules that recompute their forward in backward.

    Raises:
        ModelError: The model has no repeated blocks, or recomputes without unishard.
    """
    if asked == "none":
        return []
    refuse_own_recomputation(model, _FIELD)
    units = {id(unit.module): unit for unit in (*find_blocks(model, sharding, _FIELD), *recomputed)}
    inside = {id(part) for unit in units.values() for part in unit.module.modules() if part is not unit.module}
    return [unit for key, unit in units.items() if key not in inside]


def apply(modules: Sequence[Unit], device: torch.device, *, pin_memory: bool) -> None:
    """Make modules keep in host memory what their backward needs.

    Args:
        modules: None of them inside another; after they were made to recompute and compiled.
        device: Where the model will compute.
        pin_memory: Whether host memory is page-locked.
    """
    graphs = UnitGraphs(ActivationStore(device, pin_memory=pin_memory))
    for unit in modules:
        forward = unit.module.forward
        run = _offload_inputs if recomputes(unit.module) else _offload
        wrapped = update_wrapper(partial(run, forward, unit.module, graphs), forward)
        wrapped.compiles = is_compiled(unit.module)  # type: ignore[attr-defined]  # for `contract.kit.forwards`
        unit.module.forward = wrapped


def _offload(forward: Callable[..., Any], module: nn.Module, graphs: UnitGraphs, /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    choice = _Choice(graphs, PlacedWeights(module, tensors_in((args, kwargs))))
    try:
        with torch.autograd.graph.saved_tensors_hooks(choice.pack, _unpack):
            return forward(*args, **kwargs)
    finally:
        graphs.copies.end_unit()


def _offload_inputs(
    forward: Callable[..., Any], module: nn.Module, graphs: UnitGraphs, /, *args: Any, **kwargs: Any
) -> Any:
    """As `_offload`. torch saves only those tensors of a forward that recomputes that are passed by position."""
    bound = signature(forward).bind(*args, **kwargs)
    return _offload(forward, module, graphs, *bound.args, **bound.kwargs)


def _unpack(saved: OnDevice | OfWeight | OnHost) -> Tensor:
    return saved.tensor()


class _Choice:
    """What becomes of each tensor that one forward of a unit saves."""

    def __init__(self, graphs: UnitGraphs, weights: PlacedWeights) -> None:
        self._graphs, self._weights = graphs, weights
        self._own: UnitGraph = graphs.begin()

    def pack(self, tensor: Tensor) -> OnDevice | OfWeight | OnHost:
        """A weight is found again where it is gathered, a large activation goes, and what is small stays."""
        if not _is_plain(tensor) or tensor.device != self._graphs.copies.device:
            return OnDevice(tensor)
        weight = self._weights.owner(tensor)
        if weight is not None:
            return OfWeight(weight, tensor) if weight.dtype == tensor.dtype else OnDevice(tensor)
        goes = SMALL < tensor.untyped_storage().nbytes() <= _PARTS * tensor.nbytes
        return OnHost(tensor, self._graphs, self._own) if goes else OnDevice(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes, size and stride say everything."""
    known = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return known and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
