"""Linear modules of which a rank has some output features or some input features, with adapters of peft behind them."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from unishard.distributed.slices import full_shape
from unishard.errors import ModelError
from unishard.parallel.tensor.cutter import Cutter, require_plain


def base_of(name: str, module: Any) -> nn.Linear:
    """The linear module itself, which adapters may wrap.

    Raises:
        ModelError: It is another module, or has other adapters than LoRA's two matrices.
    """
    if hasattr(module, "parameter_name"):  # ParamWrapper of peft
        raise ModelError(
            f"parallel.tensor cannot cut {name}, whose adapter is one of a parameter; name the module in "
            "target_modules in place of the parameter in target_parameters"
        )
    base = getattr(module, "base_layer", module)
    for own, parameter in base.named_parameters(recurse=False):
        require_plain(f"{name}.{own}", parameter)
    if not isinstance(base, nn.Linear):
        raise ModelError(
            f"parallel.tensor.plan cuts {name}, which is {type(base).__name__} and no nn.Linear; leave it out of "
            "the plan"
        )
    if base is not module and (not hasattr(module, "lora_A") or module.lora_variant or module.use_dora.get("default")):
        raise ModelError(
            f"parallel.tensor cannot cut {name}, whose adapter ({type(module).__name__}) is not plain LoRA; use LoRA "
            "without variants such as DoRA, or leave the module out of target_modules"
        )
    return base


def sizes(name: str, module: Any) -> tuple[int, int]:
    """The output and the input features of the whole module."""
    outputs, inputs = full_shape(base_of(name, module).weight)
    return outputs, inputs


def cut_outputs(cutter: Cutter, name: str, module: Any, rows: slice | None, packed: int = 1) -> None:
    """Cut output features, or use some `rows` of a whole weight."""
    linear = base_of(name, module)
    for each in (linear, *_second(module)):
        for own in _parameters(each):
            if rows is None:
                cutter.cut(each, own, 0, packed)
            else:
                cutter.see(each, {own: partial(_some_rows, cutter, rows)})
    for down in _first(module):  # whole: its gradient comes from this rank's rows of the second matrix
        cutter.count_parts(down)
    cutter.inputs(module, cutter.peers.copy)


def _some_rows(cutter: Cutter, rows: slice, parameter: Tensor) -> Tensor:
    return cutter.part_of_gradient(parameter)[rows]


def cut_inputs(cutter: Cutter, name: str, module: Any) -> None:
    """Cut input features; the bias is added once."""
    linear = base_of(name, module)
    for each in (linear, *_first(module)):
        cutter.cut(each, "weight", 1)
        if "bias" in _parameters(each):
            cutter.see(each, {"bias": cutter.added_once})
    for up in _second(module):  # whole: it sees this rank's part of a sum
        cutter.count_parts(up)
        if "bias" in _parameters(up):
            cutter.see(up, {"bias": cutter.added_once})
    cutter.output(module, cutter.peers.sum)


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _first(module: Any) -> list[nn.Module]:
    return [*getattr(module, "lora_A", {}).values()]


def _second(module: Any) -> list[nn.Module]:
    return [*getattr(module, "lora_B", {}).values()]
