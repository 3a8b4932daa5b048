"""At stage 3: modules whose parameters DeepSpeed gathers each time that they are entered, besides the leaf modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unishard.contract.kit.replicated import is_replicated
from unishard.contract.units import Unit
from unishard_deepspeed.private.partitioned import is_partitioned


def entered_modules(model: nn.Module, *names: Sequence[str]) -> list[Unit]:
    """Modules with parameters of their own that are sharded, except those with one of these names, and
    what is inside them.
    """
    known = [name for each in names for name in each]
    return [
        Unit(name, module)
        for name, module in model.named_modules()
        if any(map(is_sharded, module.parameters(recurse=False))) and name not in known and not is_inside(name, known)
    ]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed gathers it."""
    return is_partitioned(parameter) and not is_replicated(parameter)


def is_inside(name: str, modules: Sequence[str]) -> bool:
    """Whether a module is inside one of others, all by name."""
    return any(name.startswith(f"{module}.") for module in modules)
