"""Hybrid sharding: each group of ranks holds a copy of the model."""

from __future__ import annotations

from dataclasses import replace

from unishard.config.nested import merge
from unishard.testing.cells import STRATEGIES, Feature
from unishard.testing.features import access, accumulation
from unishard.testing.models import MODELS

_HYBRID = ("hybrid_shard", "hybrid_shard_grad_op")
GROUPS = {"sharding": {"group_size": 2}}

SHARDING = (
    Feature(
        "hybrid",
        "hybrid sharding in groups of 2 ranks",
        GROUPS,
        models=MODELS,
        strategies=_HYBRID,
        worlds=(4,),
        accumulation=3,
    ),
    Feature(
        "one_group",
        "hybrid sharding with one group of all ranks",
        strategies=_HYBRID,
        precisions=("fp32",),
        worlds=(1, 2),
        accumulation=1,
        clip=None,
    ),
    *(
        replace(
            feature,
            name=f"hybrid_{feature.name}",
            about=f"{feature.about}, with hybrid sharding in groups of 2 ranks",
            sections=merge(feature.sections, GROUPS),
            models={"mlp": MODELS["mlp"]},
            strategies=_HYBRID,
            worlds=(4,),
        )
        for feature in (*accumulation.FEATURES, *access.FEATURES)
        if feature.strategies == STRATEGIES
    ),
)
