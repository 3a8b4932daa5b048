"""Weights that are read outside the forward of their modules, as full tensors with a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import nn

from unishard.contract.adapter import ShardedModel
from unishard.distributed.slices import slice_of
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.place import Phase
from unishard.engine.state.named_parameters import NamedParameters
from unishard.errors import ContractError


@contextmanager
def unsharded(
    parameters_of: NamedParameters, adapter: ShardedModel, order: CallOrder, names: Iterable[str]
) -> Iterator[dict[str, nn.Parameter]]:
    """A block in which parameters are full, see `Weights.unsharded`. Collective."""
    if order.blocks.unsharded:
        raise ContractError(
            "engine.weights.unsharded() was entered inside engine.weights.unsharded(); name all parameters in one block"
        )
    found = parameters_of.find_all("weights.unsharded", names)
    for name, parameter in found.items():
        if slice_of(parameter) is not None:
            raise ContractError(
                f"weights.unsharded: {name} is divided by `parallel`, and a rank computes with its part only; "
                "read it with engine.weights.read(name)"
            )
    full_names = list(found)
    trains = torch.is_grad_enabled() and adapter.updates is not None and not order.blocks.frozen
    parameters: dict[str, nn.Parameter] = {}
    order.place.gather()
    try:
        with order.blocks.inside("unsharded"), adapter.unsharded(full_names):
            parameters.update((name, attrgetter(name)(adapter.module)) for name in full_names)
            versions = [parameter._version for parameter in parameters.values()]
            yield parameters
            if [parameter._version for parameter in parameters.values()] != versions:
                raise ContractError(
                    f"a parameter was edited inside engine.weights.unsharded(), which holds copies: "
                    f"{', '.join(full_names[:3])}; edit weights inside `with engine.weights.gathered(names):`, which "
                    "writes them back"
                )
            if (
                trains
                and adapter.module.training
                and (order.place.graph or not (order.place.phase is Phase.BACKWARD_DONE or order.place.discarded))
            ):
                raise ContractError(
                    "engine.weights.unsharded() ended without a backward, which needs the full weights; call "
                    "engine.backward(loss) inside the block, or use torch.no_grad() around it if you only read weights"
                )
    finally:
        parameters.clear()  # their memory is freed: a read would end the process
