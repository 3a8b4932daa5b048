"""QLoRA: adapters on a frozen base whose weights bitsandbytes has quantized. Plain torch runs its layers, not ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unishard.testing.cells import Feature
from unishard.testing.models import MODELS, TestModel, llama


def quantized_by_bitsandbytes(model: nn.Module, word: str, *, double: bool = False) -> nn.Module:
    """Replace the linear layers of a model but for its head by those of bitsandbytes, as transformers does.

    Args:
        model: On the CPU, in fp32.
        word: `nf4`, `fp4` or `int8`.
        double: Whether to quantize the scales too.
    """
    from bitsandbytes import nn as layers

    for name, linear in [*model.named_modules()]:
        if type(linear) is not nn.Linear or name == "lm_head":
            continue
        parent, _, attribute = name.rpartition(".")
        sizes: Any = (linear.in_features, linear.out_features, linear.bias is not None)
        if word == "int8":
            made = layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
            weight = layers.Int8Params(linear.weight.data, requires_grad=False)
        else:
            made = layers.Linear4bit(*sizes, compress_statistics=double, quant_type=word)
            weight = layers.Params4bit(linear.weight.data, compress_statistics=double, quant_type=word, module=made)
        made.weight = weight.to("cpu")  # quantizes it
        if linear.bias is not None:
            made.bias = linear.bias
        setattr(model.get_submodule(parent), attribute, made)
    kind: Any = model
    kind.is_loaded_in_8bit, kind.is_loaded_in_4bit = word == "int8", word != "int8"  # as peft asks
    return model


def with_adapters(model: nn.Module, **more: Any) -> nn.Module:
    """Add adapters that all have a gradient from the first step on, the same on every call.

    Args:
        model: Gets them.
        more: Arguments of `LoraConfig`.
    """
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = LoraConfig(r=3, lora_alpha=8, target_modules=targets, init_lora_weights=False, **more)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft 0.21.2 asks transformers 5.23 by an old name (peft/peft_model.py).
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(5)
        adapted: nn.Module = get_peft_model(model, adapters)
        return adapted


def _built(word: str, *, double: bool = False) -> Callable[[], nn.Module]:
    return lambda: with_adapters(quantized_by_bitsandbytes(llama(intermediate_size=42), word, double=double))


FEATURES = (
    Feature(
        "qlora",
        "adapters on a base in nf4 of bitsandbytes, with double quantization",
        models={"llama": TestModel(_built("nf4", double=True), MODELS["llama"].sample)},
    ),
    Feature(
        "qlora_int8_recomputed",
        "adapters on a base in int8 of bitsandbytes, with activation checkpointing",
        sections={"activation_checkpointing": "full"},
        models={"llama": TestModel(_built("int8"), MODELS["llama"].sample)},
        precisions=("fp32",),
    ),
)
