"""All features that are compared with plain torch, by area, whose cells run in the same processes."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.testing.cells import Feature
from unishard.testing.features import (
    access,
    accumulation,
    combinations,
    conditional,
    eight_bit,
    evaluation,
    experts,
    layers,
    lora,
    matrices,
    models,
    offload,
    optimizers,
    plain,
    precision,
    quantization,
    recomputation,
    replicated,
    sequence,
    sharding,
)

__all__ = ["AREAS", "FEATURES", "area_of"]

AREAS: Mapping[str, tuple[Feature, ...]] = {
    "plain": plain.PLAIN,
    "accumulation": accumulation.FEATURES,
    "access": access.FEATURES,
    "optimizers": optimizers.FEATURES,
    "matrices": matrices.MATRICES,
    "eight_bit": eight_bit.FEATURES,
    "lora": lora.FEATURES,
    "quantization": quantization.FEATURES,
    "evaluation": evaluation.EVALUATION,
    "sharding": (*sharding.SHARDING, *experts.FEATURES, *layers.FEATURES),
    "offload": offload.OFFLOAD,
    "precision": precision.PRECISION,
    "models": models.FEATURES,
    "recomputation": recomputation.RECOMPUTATION,
    "units": conditional.FEATURES,
    "replicated": replicated.FEATURES,
    "sequence": sequence.FEATURES,
    "combinations": combinations.FEATURES,
}
"""Features by area, in the order of the table."""

FEATURES: Mapping[str, Feature] = {feature.name: feature for features in AREAS.values() for feature in features}
"""By name."""


def area_of(feature: str) -> str:
    """The area that a feature belongs to."""
    return next(area for area, features in AREAS.items() if feature in {member.name for member in features})
