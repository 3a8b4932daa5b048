"""The weights of a model with LoRA adapters as they are once these are merged (peft 0.21, tuners/lora/layer.py), and
quantized weights are dequantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.slice_order import MEMORY_ORDER, SliceOrder
from unishard.engine.model.quantization.linear import SCALES, QuantizedLinear, quantized_layers
from unishard.errors import ContractError

_PREFIX = "base_model.model."
_BASE = "base_layer."


class MergedAdapters:
    """Names and weights of the base model, with what its active adapters add."""

    def __init__(self, module: nn.Module) -> None:
        """Find the adapters.

        Args:
            module: A model with adapters of peft, or without any; with quantized layers or without.

        Raises:
            ContractError: An adapter is of a kind that is not merged here.
        """
        quantized = {f"{path}." if path else "": part for path, part in quantized_layers(module)}
        self._quantized = {f"{path}{part.elements_name}": (path, part) for path, part in quantized.items()}
        """By the name of their elements, the layers and their paths."""
        self._scales = {f"{path}{SCALES}" for path in quantized}
        model: Any = module
        wrapped = hasattr(model, "peft_config") and hasattr(model, "base_model")
        self._prefix = _PREFIX if wrapped else ""
        self.base: nn.Module = model.get_base_model() if wrapped else model
        """The model to which the adapters were added."""
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
        return self._name_of(self._weight(name))

    def _weight(self, name: str) -> str:
        """The name that a weight has where it is not quantized."""
        return f"{self._quantized[name][0]}weight" if name in self._quantized else name

    def _name_of(self, name: str) -> str | None:
        for path, used in self._copies.items():
            if name.startswith(path):
                return self._outer(path + name.removeprefix(used)) if name.startswith(used) else None
        for path in self._layers:
            if name.startswith(path):
                inner = name.removeprefix(path)
                return self._outer(path + inner.removeprefix(_BASE)) if inner.startswith(_BASE) else None
        return self._outer(name)

    def shown(self, shards: Mapping[str, LazyShard]) -> dict[str, LazyShard]:
        """Shards by name, those of quantized elements as the weights that they stand for; `added_to` reads these."""
        weights = {}
        for name, (_, layer) in self._quantized.items():
            storage, elements = layer.storage, shards[name]
            in_a_byte = -(-storage.numel // storage.sizes[0])
            start, end = (min(in_a_byte * place, storage.numel) for place in (elements.start, elements.end))
            weights[name] = LazyShard(torch.Size(storage.shape), torch.float32, start, end, _unread)
        return {**shards, **weights}

    def needed_for(self, names: Iterable[str]) -> list[str]:
        """The tensors that `added_to` needs in full for these weights; all by their names in the model."""
        return [*dict.fromkeys(name for weight in names for name in self._needed(weight))]

    def _needed(self, weight: str) -> Iterator[str]:
        if weight in self._quantized:
            yield from (weight, self._quantized[weight][0] + SCALES)
        for inner, outer, *_ in self._pairs(weight):
            yield from (inner, outer)

    def added_to(self, name: str, weight: LazyShard, full: Mapping[str, Tensor]) -> LazyShard:
        """This rank's shard of a weight together with what adapters add to it, dequantized.

        Args:
            name: Of the weight, in the model with adapters.
            weight: Its shard, as `shown`.
            full: The tensors that it needs.
        """
        pairs = [*self._pairs(name)]
        if not pairs and name not in self._quantized:
            return weight

        def read(begin: int, end: int) -> Tensor:
            values = self._values(name, weight, full, begin, end)
            for inner, outer, scaling, transposed in pairs:
                left, right = full[outer], full[inner]
                left, right = (right.T, left.T) if transposed else (left, right)
                added = _product(left, right, weight.order, begin, end) * scaling
                values = values.to(added) + added
            return values

        return weight._replace(read=read)

    def _values(self, name: str, weight: LazyShard, full: Mapping[str, Tensor], begin: int, end: int) -> Tensor:
        """Elements of the base model's weight, in fp32."""
        if name not in self._quantized:
            return weight.read(begin, end).float()
        path, layer = self._quantized[name]
        dequantized = layer.storage.dequantized(full[name].view(-1), full[path + SCALES].view(-1), torch.float32)
        return dequantized.view(-1)[begin:end]

    def _pairs(self, name: str) -> Iterator[tuple[str, str, float, bool]]:
        """Of each adapter that changes a weight: its two matrices, what their product is scaled by, and whether that is
        transposed.
        """
        path = self._weight(name).removesuffix(f"{_BASE}weight")
        if path not in self._layers:
            return
        layer = self._layers[path]
        for adapter in _added(layer):
            inner, outer = (f"{path}{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
            yield inner, outer, layer.scaling[adapter], getattr(layer, "fan_in_fan_out", False)

    def _outer(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def _product(left: Tensor, right: Tensor, order: SliceOrder, begin: int, end: int) -> Tensor:
    """Elements of a product of matrices between two."""
    if order != MEMORY_ORDER:
        return order.counted(left @ right)[begin:end]
    columns = right.shape[1]
    first, last = begin // columns, -(-end // columns)  # rows, of which this rank may have a part
    return (left[first:last] @ right).reshape(-1)[begin - first * columns : end - first * columns]


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


def _unread(begin: int, end: int) -> Tensor:
    raise NotImplementedError("elements of a quantized weight are read together with their scales")
