"""Applies styles to the modules and parameters of a model, or of a block of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from unishard.distributed.slices import slice_of
from unishard.errors import ModelError
from unishard.parallel.tensor.cutter import Cutter
from unishard.parallel.tensor.heads import Heads
from unishard.parallel.tensor.styles import MODULES, PARAMETERS, Target, style_tied


def apply_styles(cutter: Cutter, modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> None:
    """Cut what has a style.

    Args:
        cutter: Of these modules.
        modules: By name.
        styles: By names of modules and parameters.

    Raises:
        ModelError: A style is not supported, or something cannot be cut in its way.
    """
    heads = Heads(cutter, modules)
    divided = {module for module in modules.values() if has_slices(module)}

    def target(name: str, module: nn.Module) -> Target:
        return Target(cutter, heads, name, module, modules.get(name.rpartition(".")[0]))

    for name, style in styles.items():
        known = MODULES if name in modules else PARAMETERS
        if style not in known:
            raise ModelError(
                f"parallel.tensor.plan: the style {style} of {name} is not supported there; write one of "
                f"{', '.join(sorted(known))}"
            )
        if name in modules:
            for each in _in_use(modules[name]):
                MODULES[style](target(name, each))
        else:
            owner, _, own = name.rpartition(".")
            PARAMETERS[style](cutter, modules[owner], own)
    for name, module in modules.items():
        if module not in cutter.slices and module not in divided and has_slices(module):
            style_tied(target(name, module))
    for name, style in styles.items():
        if style == "moe_tp_experts" and not any(map(slice_of, modules[name].parameters())):
            raise ModelError(
                f"parallel.tensor: the results of {name} ({type(modules[name]).__name__}) are added up over ranks, but "
                "its weights are whole; name them in parallel.tensor.plan, and leave them out of target_parameters of "
                "peft"
            )


def has_slices(module: nn.Module) -> bool:
    """Whether a module has parameters that are cut."""
    return any(map(slice_of, module.parameters(recurse=False)))


def _in_use(module: Any) -> list[nn.Module]:
    """A module, or those that peft's wrapper passes its calls to."""
    copies = getattr(module, "modules_to_save", None)
    return [module.original_module, *copies.values()] if isinstance(copies, nn.ModuleDict) else [module]
