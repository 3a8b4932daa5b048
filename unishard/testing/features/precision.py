"""Other precisions than fp32 and bf16 with fp32 master weights: fp16, models loaded in bf16, and training without
master weights.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from unishard.testing.cells import Feature
from unishard.testing.features.offload import ADAMW
from unishard.testing.models import MODELS, TestModel


def _in_bf16(name: str) -> nn.Module:
    """A model as loaded from a bf16 checkpoint: bf16 parameters, fp32 buffers."""
    model = MODELS[name].build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


_LOADED = {name: TestModel(partial(_in_bf16, name), model.sample) for name, model in MODELS.items()}

PRECISION = (
    Feature(
        "fp16",
        "fp16 with a dynamic loss scale that starts too high and grows soon, so that steps are skipped",
        {"precision": {"initial_loss_scale": 2.0**21, "loss_scale_growth_interval": 5}},
        models=MODELS,
        precisions=("fp16",),
        steps_in_suite=14,
    ),
    Feature(
        "fp16_static_scale",
        "fp16 with a constant loss scale",
        {"precision": {"loss_scale": 128}},
        precisions=("fp16",),
        accumulation=1,
    ),
    Feature("bf16_loaded", "a model loaded in bf16, trained with fp32 master weights", models=_LOADED),
    # One micro-batch per window, since each engine has its own order of summing bf16 gradients over ranks and
    # micro-batches. AdamW, whose fused kernel rounds once; torch's SGD on the CPU rounds the last elements of a tensor
    # differently.
    Feature(
        "pure_bf16",
        "weights and optimizer state in bf16, no master weights",
        {"precision": {"master": "bf16"}, "optimizer": ADAMW},
        models=MODELS,
        precisions=("bf16",),
        accumulation=1,
    ),
)
