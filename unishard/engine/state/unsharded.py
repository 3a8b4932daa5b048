"""Weights that are read outside the forward of their modules, as full tensors with a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import nn

from unishard.contract.adapter import InferenceAdapter
from unishard.engine.loop.call_order import CallOrder, Phase
from unishard.engine.state.parameter_access import ParameterAccess
from unishard.errors import ContractError, ModelError, UnishardError


@contextmanager
def unsharded(
    access: ParameterAccess, adapter: InferenceAdapter, order: CallOrder, names: Iterable[str]
) -> Iterator[dict[str, nn.Parameter]]:
    """A block in which parameters are full; implements `Engine.unsharded`."""
    if order.unsharded:
        raise ContractError(
            "engine.unsharded() was entered inside engine.unsharded(); name all parameters in one block"
        )
    found = list(access.find_all("unsharded", names))
    trains = torch.is_grad_enabled() and adapter.training is not None and not order.frozen
    parameters: dict[str, nn.Parameter] = {}
    order.unsharded = order.gathered = True
    try:
        with adapter.unsharded(found):
            parameters.update((name, attrgetter(name)(adapter.module)) for name in found)
            versions = [parameter._version for parameter in parameters.values()]
            yield parameters
            if [parameter._version for parameter in parameters.values()] != versions:
                raise ContractError(
                    f"a parameter was edited inside engine.unsharded(), which holds copies: {', '.join(found[:3])}; "
                    "edit weights inside `with engine.gathered(names):`, which writes them back"
                )
            if (
                trains
                and adapter.module.training
                and (order.graph or not (order.phase is Phase.BACKWARD_DONE or order.discarded))
            ):
                raise ContractError(
                    "engine.unsharded() ended without a backward, which needs the full weights; call "
                    "engine.backward(loss) inside the block, or use torch.no_grad() around it if you only read weights"
                )
    finally:
        order.unsharded = False
        parameters.clear()  # their memory is freed: a read would end the process


@contextmanager
def naming_sharded_reads(adapter: InferenceAdapter) -> Iterator[None]:
    """A block that runs the model, in which the error of an operation on a sharded weight becomes one that says what to
    write.
    """
    try:
        yield
    except RuntimeError as error:
        why = explain_sharded_read(adapter, error)
        if why is None:
            raise
        raise ModelError(why) from error


def explain_sharded_read(adapter: InferenceAdapter, error: BaseException | None) -> str | None:
    """What to write where a weight was read outside its module; None for other errors."""
    if isinstance(error, UnishardError) or not isinstance(error, RuntimeError):
        return None
    helps = adapter.reads_shard(error)
    if helps is None:
        return None
    why = str(error).partition("\n")[0]
    return (
        f"a weight is used outside the forward of its module, where a rank has only a shard of it ({why}); put the "
        "forward and the backward into a block `with engine.unsharded([name, ...]):` with the names of such weights, "
        f"or read one with engine.parameter(name), and norms with engine.parameter_norms(){helps and f'; {helps}'}"
    )
