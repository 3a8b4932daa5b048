"""Arguments of Lightning 2's Trainer, Fabric and LightningCLI as a file, which is only read."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.markers import Markers, weighted

__all__ = ["FORMAT"]

_MARKERS = weighted(
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

FORMAT = Deferred("lightning", Markers(_MARKERS), read_only=True)
