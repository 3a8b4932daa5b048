"""axolotl's YAML, which becomes TrainingArguments of transformers."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs, weighted

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        5: "base_model",
        4: "sequence_len",
        3: "micro_batch_size datasets val_set_size",
        2: "adapter num_epochs",
        1: "deepspeed fsdp fsdp_config learning_rate",
    }
)

FORMAT = Deferred("axolotl", Signs(_SIGNS))
