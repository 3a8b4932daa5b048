"""axolotl's YAML, which becomes TrainingArguments of transformers."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "base_model": 5,
    "sequence_len": 4,
    "micro_batch_size": 3,
    "datasets": 3,
    "val_set_size": 3,
    "adapter": 2,
    "deepspeed": 1,
    "fsdp": 1,
    "fsdp_config": 1,
    "learning_rate": 1,
    "num_epochs": 2,
}

FORMAT = Deferred("axolotl", Signs(_SIGNS))
