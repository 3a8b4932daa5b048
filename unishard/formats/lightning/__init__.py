"""Arguments of Lightning 2's Trainer, Fabric and LightningCLI as a file, which is only read."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs, weighted

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        5: "trainer.strategy fit.trainer fabric.strategy",
        4: (
            "strategy trainer.accelerator trainer.devices trainer.accumulate_grad_batches trainer.gradient_clip_val "
            "accumulate_grad_batches class_path"
        ),
        3: "trainer.precision seed_everything gradient_clip_val init_args",
        2: "accelerator devices trainer.max_epochs trainer.max_steps",
        1: "num_nodes",
    }
)

FORMAT = Deferred("lightning", Signs(_SIGNS), read_only=True)
