"""The JSON file of `deepspeed.initialize`."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "zero_optimization": 3,
    "train_micro_batch_size_per_gpu": 3,
    "train_batch_size": 3,
    "zero_allow_untested_optimizer": 3,
    "zero_force_ds_cpu_optimizer": 3,
    "steps_per_print": 2,
    "wall_clock_breakdown": 2,
    "fp16": 1,
    "bf16": 1,
    "fp16.enabled": 2,
    "bf16.enabled": 2,
    "bfloat16": 2,
    "gradient_clipping": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": 1,
    "optimizer.type": 2,
    "optimizer.params": 2,
    "scheduler": 1,
    "scheduler.type": 2,
    "activation_checkpointing": 1,
    "communication_data_type": 3,
    "compression_training": 2,
    "autotuning": 2,
    "data_efficiency": 2,
    "tensorboard": 1,
    "aio": 2,
    "compile.deepcompile": 3,
}

FORMAT = Deferred("deepspeed", Signs(_SIGNS))
