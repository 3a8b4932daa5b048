"""torchtitan's TOML files, which its releases up to 0.2 (2025) read; later ones are configured in Python."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "parallelism": 5,
    "job": 3,
    "training": 1,
    "training.steps": 2,
    "training.seq_len": 2,
    "training.local_batch_size": 3,
    "lr_scheduler": 3,
    "activation_checkpoint": 3,
    "optimizer": 1,
    "model": 1,
    "model.flavor": 3,
}

FORMAT = Deferred("torchtitan", Signs(_SIGNS))
