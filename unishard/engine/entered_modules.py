"""Check that all ranks enter the modules whose parameters are gathered in the same order: a branch that depends on data
breaks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from unishard.contract.units import Unit
from unishard.engine.loop.call_order import CallOrder

# Checks that all ranks enter the modules whose parameters are gathered in the same order: a branch that depends on
# data breaks it.


def named_with_class(units: Iterable[Unit]) -> dict[str, nn.Module]:
    """Units by what errors call them, such as `layers.0 (LlamaDecoderLayer)`; call it before sharding changes their
    classes.
    """
    return {f"{unit.name} ({type(unit.module).__name__})": unit.module for unit in units}


def watch_modules(order: CallOrder, units: Mapping[str, nn.Module]) -> None:
    """Register a hook on each unit, before the engine's, which gathers its parameters; removed when `order` is
    closed.
    """
    for name, module in units.items():
        order.on_close(module.register_forward_pre_hook(_hook(order, name, module), prepend=True).remove)


def _hook(order: CallOrder, name: str, unit: nn.Module) -> Any:
    def enter(module: nn.Module, args: Any) -> None:
        # Not a copy of the model, for example one with averaged weights, and not where a backward computes it again.
        if module is unit and order.blocks.forward:
            order.ranks.enter_module(name)

    return torch.compiler.disable(enter)  # type: ignore[no-untyped-call]
