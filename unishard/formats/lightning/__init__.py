"""Arguments of Lightning's Trainer, Fabric and LightningCLI as a file; written as Python."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "strategy": 4,
    "accelerator": 2,
    "devices": 2,
    "num_nodes": 1,
    "trainer.strategy": 5,
    "trainer.accelerator": 4,
    "trainer.devices": 4,
    "trainer.precision": 3,
    "trainer.max_epochs": 2,
    "trainer.max_steps": 2,
    "trainer.accumulate_grad_batches": 4,
    "trainer.gradient_clip_val": 4,
    "fit.trainer": 5,
    "lightning.trainer": 5,
    "fabric.strategy": 5,
    "seed_everything": 3,
    "gradient_clip_val": 3,
    "accumulate_grad_batches": 4,
    "class_path": 4,
    "init_args": 3,
}

FORMAT = Deferred("lightning", Signs(_SIGNS))
