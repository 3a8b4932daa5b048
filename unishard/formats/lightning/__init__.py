"""Arguments of Lightning's Trainer, Fabric and LightningCLI as a file; written as Python."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.hydra import names_lightning
from unishard.formats.signs import Signs, weighted

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        5: "trainer.strategy fit.trainer lightning.trainer fabric.strategy",
        4: (
            "strategy trainer.accelerator trainer.devices trainer.accumulate_grad_batches trainer.gradient_clip_val "
            "accumulate_grad_batches class_path"
        ),
        3: "trainer.precision seed_everything gradient_clip_val init_args",
        2: "accelerator devices trainer.max_epochs trainer.max_steps",
        1: "num_nodes",
    }
)

FORMAT = Deferred("lightning", Signs(_SIGNS, lambda data: 5 if names_lightning(data) else 0))
