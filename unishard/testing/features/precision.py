"""Number formats beside fp32 and bf16 with fp32 masters: fp16, models loaded in bf16, and training without masters."""

from __future__ import annotations

from functools import partial

from torch import nn

from unishard.testing.cells import Feature
from unishard.testing.models import MODELS, TestModel

__all__ = ["FEATURES"]


def _in_bf16(name: str) -> nn.Module:
    """A model as it comes from a checkpoint in bf16: its parameters are, its buffers are not."""
    model = MODELS[name].build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


_LOADED = {name: TestModel(partial(_in_bf16, name), model.sample) for name, model in MODELS.items()}
_ADAMW = {"name": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}

FEATURES = (
    Feature(
        "fp16",
        "fp16 with a dynamic loss scale that begins where gradients overflow and soon grows again, so that updates are skipped",
        {"precision": {"initial_loss_scale": 2.0**21, "loss_scale_growth_interval": 5}},
        models=MODELS,
        precisions=("fp16",),
    ),
    Feature(
        "fp16_static_scale", "fp16 with a constant loss scale", {"precision": {"loss_scale": 128}}, precisions=("fp16",), accumulation=1
    ),
    Feature("bf16_loaded", "a model loaded in bf16, trained with fp32 masters", models=_LOADED),
    # One micro-batch a window, since the order in which bf16 gradients are added up over ranks and micro-batches is an engine's own.
    # AdamW, whose fused kernel rounds once; torch's SGD on the CPU rounds elements at the end of a tensor otherwise than the rest.
    Feature(
        "pure_bf16",
        "weights and optimizer state in bf16, no masters",
        {"precision": {"master": "bf16"}, "optimizer": _ADAMW},
        models=MODELS,
        precisions=("bf16",),
        accumulation=1,
    ),
)
