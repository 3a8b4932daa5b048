"""Files of `accelerate config`, which `accelerate launch --config_file` reads."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "distributed_type": 4,
    "compute_environment": 4,
    "fsdp_config": 1,
    "deepspeed_config": 3,
    "megatron_lm_config": 3,
    "parallelism_config": 3,
    "num_machines": 2,
    "machine_rank": 2,
    "main_process_port": 2,
    "main_training_function": 3,
    "same_network": 2,
    "rdzv_backend": 2,
    "mixed_precision": 1,
    "num_processes": 2,
    "downcast_bf16": 3,
}

FORMAT = Deferred("accelerate", Signs(_SIGNS))
