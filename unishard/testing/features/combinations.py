"""Common combinations of features that interact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unishard.config.nested import merge
from unishard.testing.cells import STRATEGIES, Feature
from unishard.testing.features import conditional, lora
from unishard.testing.models import MODELS

_EXPERTS, _TOWER = conditional.FEATURES
_LORA, _BF16_BASE = lora.FEATURES[:2]
_GROUPS = {"sharding": {"group_size": 2}}


def _with(feature: Feature, name: str, about: str, sections: dict[str, Any], **changes: Any) -> Feature:
    return replace(
        feature, name=name, about=f"{feature.about}; {about}", sections=merge(feature.sections, sections), **changes
    )


FEATURES = (
    _with(
        _EXPERTS,
        "offloaded_experts",
        "parameters and optimizer in host memory",
        {"offload": "cpu"},
        strategies=("full_shard",),
    ),
    _with(
        _EXPERTS,
        "recomputed_experts",
        "every block recomputes its forward",
        {"activation_checkpointing": ["Routed"]},
        strategies=("no_shard", "full_shard"),
        precisions=("fp32",),
    ),
    _with(
        _TOWER,
        "hybrid_skipped_tower",
        "hybrid sharding in groups of 2 ranks",
        _GROUPS,
        strategies=("hybrid_shard", "hybrid_shard_grad_op"),
        precisions=("fp32",),
        worlds=(4,),
    ),
    _with(
        _LORA,
        "offloaded_lora",
        "parameters and optimizer in host memory, every block recomputes its forward",
        {"offload": "cpu", "activation_checkpointing": "full"},
        strategies=("full_shard",),
    ),
    _with(
        _BF16_BASE,
        "hybrid_lora_bf16_base",
        "hybrid sharding in groups of 2 ranks",
        _GROUPS,
        strategies=("hybrid_shard",),
        worlds=(4,),
    ),
    Feature(
        "compiled_fp16",
        "fp16 with a dynamic loss scale, each block compiled",
        {"compile": {"mode": "per_block", "backend": "aot_eager"}},
        strategies=("no_shard", "full_shard"),
        precisions=("fp16",),
    ),
    Feature(
        "offloaded_recomputed_fp16",
        "fp16 with a dynamic loss scale, the optimizer in host memory, every block recomputes its forward",
        {"offload": {"optimizer": "cpu"}, "activation_checkpointing": "full"},
        models={"llama": MODELS["llama"]},
        strategies=STRATEGIES[1:],
        precisions=("fp16",),
    ),
)
