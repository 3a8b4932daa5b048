"""unishard's own YAML as one format among the others."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs, weighted
from unishard.formats.unishard.recognition import only_fields

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        3: "backend sharding precision.compute native training.micro_batch_size training.gradient_clipping",
        2: "offload communication",
        1: "activation_checkpointing training optimizer.name scheduler.name strict",
    }
)

FORMAT = Deferred("unishard", Signs(_SIGNS, only_fields))
