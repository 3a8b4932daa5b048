"""Groups of ranks that hold a copy each."""

from __future__ import annotations

from unishard.testing.cells import Feature
from unishard.testing.models import MODELS

__all__ = ["FEATURES"]

HYBRID = ("hybrid_shard", "hybrid_shard_grad_op")

FEATURES = (
    Feature("hybrid", {"sharding": {"group_size": 2}}, models=MODELS, strategies=HYBRID, worlds=(4,), accumulation=3),
    Feature("one_group", strategies=HYBRID, precisions=("fp32",), accumulation=1, clip=None),
)
