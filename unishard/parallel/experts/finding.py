"""Which modules of a model are the experts of a mixture, by what their forward takes and their parameters are."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from unishard.errors import ModelError

_ARGUMENTS = 3
"""Of the forward: tokens, their experts, the weights of these."""
_NEEDED = (
    "a module with num_experts, whose forward takes the tokens, the numbers of their experts and the weights of these, "
    "and whose parameters have an expert a row of dimension 0, as those of transformers"
)


class ExpertLayer(NamedTuple):
    """A module with the weights of all experts of a layer."""

    name: str
    module: nn.Module
    number: int
    parameters: tuple[str, ...]
    """Those with a row for each expert."""


def find_experts(model: nn.Module, size: int) -> list[ExpertLayer]:
    """The experts that a group of ranks can divide.

    Raises:
        ModelError: There are none, or some whose number the size does not divide, or that have another forward.
    """
    found = [*_experts(model)]
    kind, modules = type(model).__name__, dict(model.named_modules())
    if not found:
        raise ModelError(f"parallel.expert needs experts, and {kind} has none that it knows: {_NEEDED}")
    for each in found:
        where, count = f"{each.name} ({type(each.module).__name__})", each.number
        if len(inspect.signature(each.module.forward).parameters) != _ARGUMENTS:
            raise ModelError(f"parallel.expert cannot divide {where}, whose forward takes other arguments: {_NEEDED}")
        if hasattr(modules.get(each.name.removesuffix(".base_layer")), "parameter_name"):  # ParamWrapper of peft
            raise ModelError(
                f"parallel.expert cannot divide {where}, whose parameters have adapters of all experts; leave them out "
                "of target_parameters"
            )
        if count % size:
            fitting = [str(number) for number in range(2, count + 1) if count % number == 0]
            raise ModelError(
                f"parallel.expert is {size}, which does not divide the {count} experts of {where}; write "
                f"{' or '.join(fitting)}"
            )
    return found


def _experts(model: nn.Module) -> Iterator[ExpertLayer]:
    for name, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if not isinstance(count, int) or count < 2:
            continue
        rows = {own: each for own, each in module.named_parameters(recurse=False) if each.dim() and len(each) == count}
        if any(each.dim() >= 3 for each in rows.values()):  # a router has two dimensions
            yield ExpertLayer(name, module, count, tuple(rows))
