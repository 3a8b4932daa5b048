"""Quantized layers in a model that has no data yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from unishard.config import Quantization
from unishard.config.quantization import FOUR_BIT
from unishard.contract.kit.materialization import set_reader, take_reader
from unishard.distributed.dtypes import declared_by
from unishard.engine.model.quantization.four_bit import FourBit
from unishard.engine.model.quantization.int8 import Int8
from unishard.engine.model.quantization.linear import QuantizedLinear
from unishard.engine.model.quantization.storage import Storage
from unishard.errors import ConfigError, Problem

_SHOWN = 6


def quantize(model: nn.Module, cfg: Quantization, *, device: str = "meta") -> None:
    """Replace the linear layers of a model, and free their weights.

    What reads a weight (`set_reader`) then reads it for its bytes.

    Args:
        model: Without data.
        cfg: The section `quantization`, which is on.
        device: Of the bytes, which have no values yet.

    Raises:
        ConfigError: A pattern matches no linear layer, or no layer is left to quantize.
    """
    layers = dict(_layers(model, cfg))
    if not layers:
        message = (
            f"{cfg.type} quantizes linear layers (nn.Linear), and {type(model).__name__} has none that is not skipped"
        )
        raise ConfigError([Problem("quantization.type", f"{message}; remove quantization")])
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _without_data(layer, cfg, device))


def _layers(model: nn.Module, cfg: Quantization) -> Iterator[tuple[str, nn.Linear]]:
    """The layers to quantize by name: no subclass, which may use its weight in another way, no tied weight, and where
    something is frozen, as by peft, only what is.
    """
    frozen = not all(parameter.requires_grad for parameter in model.parameters())
    every = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not (frozen and module.weight.requires_grad)
    }
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    skipped = _automatic(model, every) if cfg.skip_modules == "auto" else _matched(every, cfg.skip_modules)
    for name, layer in every.items():
        if name and name not in skipped and uses[id(layer.weight)] == 1:
            yield name, layer


def _automatic(model: Any, layers: dict[str, nn.Linear]) -> set[str]:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kept = declared_by(model, "fp16")
    last = next(reversed(layers), None) if head is None else None
    return {name for name, layer in layers.items() if layer is head or name == last or f"{name}.weight" in kept}


def _matched(layers: dict[str, nn.Linear], patterns: list[str]) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in layers if re.search(pattern, name)}
        if not matched:
            names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in layers))
            message = f"{pattern!r} matches no linear layer; write part of a name, such as {', '.join(names[:_SHOWN])}"
            raise ConfigError([Problem("quantization.skip_modules", message)])
        found |= matched
    return found


def _without_data(layer: nn.Linear, cfg: Quantization, device: str) -> QuantizedLinear:
    storage = storage_of((layer.out_features, layer.in_features), cfg)
    elements, scales = (torch.empty(size, dtype=torch.uint8, device=device) for size in storage.sizes)
    quantized = QuantizedLinear(storage, elements, scales, layer.bias)
    if (read := take_reader(layer.weight)) is not None:
        for parameter, reader in zip((quantized.quantized, quantized.scales), storage.readers(read), strict=True):
            set_reader(parameter, reader)
    return quantized.train(layer.training)


def storage_of(shape: tuple[int, int], cfg: Quantization) -> Storage:
    """How the section says that a weight `(out, in)` is stored."""
    return FourBit(shape, cfg.type, cfg.double_quantization) if cfg.type in FOUR_BIT else Int8(shape)
