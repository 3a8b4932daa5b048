"""unishard's own YAML as one format among the others."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs
from unishard.formats.unishard.recognition import only_fields

__all__ = ["FORMAT"]

_SIGNS = {
    "backend": 3,
    "sharding": 3,
    "offload": 2,
    "precision.compute": 3,
    "activation_checkpointing": 1,
    "native": 3,
    "training": 1,
    "training.micro_batch_size": 3,
    "training.gradient_clipping": 3,
    "optimizer.name": 1,
    "scheduler.name": 1,
    "communication": 2,
    "strict": 1,
}

FORMAT = Deferred("unishard", Signs(_SIGNS, only_fields))
