"""Quantized layers in place of those of bitsandbytes, which a model has that was loaded with a `quantization_config` of
transformers, or built with its layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unishard.engine.model.quantization.four_bit import NESTED_BLOCK, FourBit, nested_bytes
from unishard.engine.model.quantization.int8 import Int8
from unishard.engine.model.quantization.linear import QuantizedLinear
from unishard.engine.model.quantization.storage import Storage, as_bytes
from unishard.errors import ModelError

_FOUR_BIT, _INT8 = "Params4bit", "Int8Params"
_OF_ITS_OWN = ("quant_state", "quant_storage", "compute_type_is_set", "support_avx512bf16_for_cpu", "state", "index")
"""Attributes of the layers of bitsandbytes, some of which hold the scales (0.50, nn/modules.py)."""

_ABSENT = (
    "absent, as unishard.init leaves it; load the model outside of it, or with unishard.from_pretrained and "
    "quantization in the config, which reads the parts of each rank"
)

Stored = tuple[Storage, Tensor, Tensor]
"""How a weight is stored, and its bytes: elements and scales."""


def description_of(model: Any) -> dict[str, str]:
    """Describe what must be equal on all ranks: whether the layers of bitsandbytes have their data, which they have
    only on rank 0 after `unishard.init`.

    Raises nothing.
    """
    parts = model.modules() if isinstance(model, nn.Module) and "bitsandbytes" in sys.modules else ()
    theirs = [part for part in parts if type(part).__module__.startswith("bitsandbytes")]
    if not theirs:
        return {}
    absent = any(each.is_meta for part in theirs for each in part.parameters())
    return {"data of the layers of bitsandbytes": _ABSENT if absent else "present"}


def adopt(model: nn.Module) -> None:
    """Change the layers of bitsandbytes in a model into ours, with the same bytes, in place.

    Does nothing to any other model, and does not import bitsandbytes.

    Args:
        model: Not sharded yet.

    Raises:
        ModelError: It has a layer of bitsandbytes that cannot be sharded.
    """
    if "bitsandbytes" not in sys.modules:
        return
    found = [(module, _stored(model, name, module)) for name, module in model.named_modules() if _holds_bytes(module)]
    for module, stored in found:
        _change(module, stored)


def _holds_bytes(module: nn.Module) -> bool:
    return any(_kind(parameter) for parameter in module.parameters(recurse=False))


def _kind(parameter: Any) -> str | None:
    """The class of bitsandbytes that a parameter is of; None for others, and for weights that are not quantized."""
    kind = type(parameter)
    if not kind.__module__.startswith("bitsandbytes") or kind.__name__ not in (_FOUR_BIT, _INT8):
        return None
    return None if getattr(parameter, "has_fp16_weights", False) else kind.__name__


def _stored(model: nn.Module, name: str, module: Any) -> Stored:
    """What a layer holds.

    Raises:
        ModelError: It is of another kind, has no bytes, or was quantized in another way.
    """
    subject = f"{name or 'the model'} of {type(model).__name__} ({type(module).__module__}.{type(module).__name__})"
    kind = next(each for each in map(_kind, module.parameters(recurse=False)) if each)
    if not isinstance(module, nn.Linear) or type(module).forward is not _FORWARDS[kind]().forward:
        raise ModelError(
            f"{subject} holds quantized weights that unishard cannot shard; it shards those of linear layers of "
            "bitsandbytes (Linear4bit, Linear8bitLt); leave this module out of the quantization (llm_int8_skip_modules)"
        )
    if module.weight.is_meta:
        raise ModelError(f"data of {subject} is {_ABSENT}")
    return _READ[kind](subject, module)


def _four_bit(subject: str, module: Any) -> Stored:
    module.state_dict()  # bitsandbytes undoes a layout of its own for evaluation on the CPU when it saves
    if module.weight.quant_state is None and getattr(module, "quant_state", None) is None:
        module.weight = module.weight.to(module.weight.device)  # quantizes it
    state = module.weight.quant_state or module.quant_state
    storage = FourBit(tuple(state.shape), state.quant_type, state.nested, state.blocksize, state.dtype)
    if state.nested and state.state2.blocksize != NESTED_BLOCK:
        raise ModelError(
            f"{subject} has scales that are quantized in blocks of {state.state2.blocksize}, and bitsandbytes "
            f"multiplies only with blocks of {NESTED_BLOCK}; quantize the model again"
        )
    scales = nested_bytes(state.absmax, state.state2, state.offset) if state.nested else as_bytes(state.absmax.float())
    return storage, as_bytes(module.weight.data), scales


def _int8(subject: str, module: Any) -> Stored:
    if module.weight.dtype != torch.int8:
        module.weight = module.weight.to(module.weight.device)  # quantizes it
    scales = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    if scales is None:
        raise ModelError(f"{subject} has no scales (SCB); load the model again")
    storage = Int8((module.out_features, module.in_features), module.state.threshold)
    return storage, as_bytes(module.weight.data), as_bytes(scales.float())


def _change(module: Any, stored: Stored) -> None:
    dtype = getattr(module, "compute_dtype", None)
    bias = vars(module)["_parameters"].pop("bias", None)
    del module.weight
    for name in _OF_ITS_OWN:
        vars(module).pop(name, None)
    module.__class__ = QuantizedLinear
    module.set_bytes(*stored)
    module.register_parameter("bias", bias)
    module.compute_dtype = dtype


def _linear_4bit() -> Any:
    from bitsandbytes.nn import Linear4bit

    return Linear4bit


def _linear_8bit() -> Any:
    from bitsandbytes.nn import Linear8bitLt

    return Linear8bitLt


_FORWARDS: Mapping[str, Callable[[], Any]] = {_FOUR_BIT: _linear_4bit, _INT8: _linear_8bit}
_READ: Mapping[str, Callable[[str, Any], Stored]] = {_FOUR_BIT: _four_bit, _INT8: _int8}
