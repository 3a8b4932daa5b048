"""Parameters without dimensions, such as CLIP's `logit_scale`, which `fully_shard` refuses (torch 2.13).

They get one dimension before they are sharded. What the model computes with, and what checkpoints hold, has none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard.contract.kit.replicated import is_replicated

_NUMBER = "_unishard_number"
"""An attribute of the parameter, which its shards get as well."""


def add_dimension(model: nn.Module) -> None:
    """Give each parameter without dimensions the shape (1,), in place; its modules still show it without dimensions."""
    numbers = [parameter for parameter in model.parameters() if _is_sharded_number(parameter)]
    for module in model.modules() if numbers else ():
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        if names := tuple(name for name, parameter in own if _is_sharded_number(parameter)):
            kind: Any = type(module)
            module.__class__ = _showing(kind, names)
    for parameter in numbers:
        setattr(parameter, _NUMBER, True)
        parameter.data = parameter.data.view(1)


def _is_sharded_number(parameter: Tensor) -> bool:
    return not parameter.dim() and not is_replicated(parameter)


def shape_of(parameter: Tensor) -> torch.Size:
    """The shape that a parameter has in the user's model."""
    return torch.Size() if hasattr(parameter, _NUMBER) else parameter.shape


def parameter_named(module: nn.Module, name: str) -> Any:
    """`module.get_parameter(name)`, also for a parameter that its module shows without dimensions."""
    path, _, own = name.rpartition(".")
    return nn.Module.__getattr__(module.get_submodule(path), own)


@cache
def _showing(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of the same name whose properties show these parameters without dimensions, as torch's
    parametrizations show theirs.
    """
    shown: dict[str, Any] = {name: property(_without_dimension(name)) for name in names}
    return type(
        kind.__name__,
        (kind,),
        {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__, **shown},
    )


def _without_dimension(name: str) -> Any:
    def show(module: nn.Module) -> Tensor:
        parameter: Any = nn.Module.__getattr__(module, name)  # finds the parameter, where `getattr` finds the property
        return parameter if isinstance(parameter, DTensor) else parameter.view(())

    return show
