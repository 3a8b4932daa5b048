"""The weights of a model with LoRA adapters as they are once these are merged (peft 0.21, tuners/lora/layer.py), and
quantized weights are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unishard.engine.model.quantization.linear import SCALES, QuantizedLinear, quantized_layers
from unishard.errors import ContractError

_PREFIX = "base_model.model."
_BASE = "base_layer."


class MergedAdapters:
    """Names and weights of the base model, with what its active adapters add."""

    def __init__(self, module: nn.Module, full: Callable[[str], Tensor]) -> None:
        """Find the adapters.

        Args:
            module: A model with adapters of peft, or without any; with quantized layers or without.
            full: Reads a full weight by its name in `module`. Collective.

        Raises:
            ContractError: An adapter is of a kind that is not merged here.
        """
        self._read = full
        quantized = {f"{path}." if path else "": part for path, part in quantized_layers(module)}
        self._quantized = {f"{path}{part.elements_name}": (path, part) for path, part in quantized.items()}
        """By the name of their elements, the layers and their paths."""
        self._scales = {f"{path}{SCALES}" for path in quantized}
        self._prefix = _PREFIX if hasattr(module, "peft_config") and hasattr(module, "base_model") else ""
        parts: list[tuple[str, Any]] = [*module.named_modules()]
        self._layers = {f"{path}.": part for path, part in parts if hasattr(part, "base_layer")}
        self._copies = {
            f"{path}.": f"{path}.modules_to_save.{part.active_adapters[0]}."
            for path, part in parts
            if hasattr(part, "modules_to_save") and hasattr(part, "original_module")
        }
        for path, layer in self._layers.items():
            if not _is_plain(layer):
                raise ContractError(
                    f"weights.stream: {path[:-1]} is a {type(layer).__module__}.{type(layer).__name__} that "
                    "merged=True cannot merge, only LoRA of linear layers; pass merged=False, or export and merge with "
                    "peft"
                )

    def name_of(self, name: str) -> str | None:
        """The name in the base model; None for what it does not have."""
        if name in self._scales:
            return None
        if name in self._quantized:
            return self._name_of(f"{self._quantized[name][0]}weight")
        return self._name_of(name)

    def _name_of(self, name: str) -> str | None:
        for path, used in self._copies.items():
            if name.startswith(path):
                return self._outer(path + name.removeprefix(used)) if name.startswith(used) else None
        for path in self._layers:
            if name.startswith(path):
                inner = name.removeprefix(path)
                return self._outer(path + inner.removeprefix(_BASE)) if inner.startswith(_BASE) else None
        return self._outer(name)

    def full(self, name: str) -> Tensor:
        """The weight, by its name in the model with adapters. Collective."""
        full = self._full(name)
        inner = f"{self._quantized[name][0]}weight" if name in self._quantized else name
        path = inner.removesuffix(f"{_BASE}weight")
        if path not in self._layers:
            return full
        layer = self._layers[path]
        for adapter in _added(layer):
            first, second = (self._full(f"{path}{part}.{adapter}.weight") for part in ("lora_A", "lora_B"))
            delta = (second @ first) * layer.scaling[adapter]
            full += delta.T if getattr(layer, "fan_in_fan_out", False) else delta
        return full

    def _full(self, name: str) -> Tensor:
        """A full weight by its name in the model, dequantized to fp32. Collective."""
        if name not in self._quantized:
            return self._read(name)
        path, layer = self._quantized[name]
        return layer.storage.dequantized(self._read(name), self._read(path + SCALES), torch.float32)

    def _outer(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def _added(layer: Any) -> list[str]:
    """The adapters of a layer that its forward adds."""
    if layer.disable_adapters or layer.merged:
        return []
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def _is_plain(layer: Any) -> bool:
    """Whether a layer adds scaled products of two matrices to the weight of a linear layer, and nothing else."""
    adapters = [*getattr(layer, "lora_A", {})]
    return (
        bool(adapters)
        and all(isinstance(layer.lora_A[each], nn.Linear) for each in adapters)
        and not any(layer.lora_variant.get(each) for each in adapters)
        and not any(layer.lora_bias.get(each) for each in adapters)
        and (isinstance(layer.base_layer, QuantizedLinear) or _has_numbers(layer.base_layer))
    )


def _has_numbers(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return weight is not None and weight.is_floating_point()
