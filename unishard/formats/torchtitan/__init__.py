"""torchtitan's TOML files, which its releases up to 0.2 (2025) read; later ones are configured in Python."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs, weighted

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        5: "parallelism",
        3: "job training.local_batch_size lr_scheduler activation_checkpoint model.flavor",
        2: "training.steps training.seq_len",
        1: "training optimizer model",
    }
)

FORMAT = Deferred("torchtitan", Signs(_SIGNS), read_only=True)
