"""Files of `accelerate config`, which `accelerate launch --config_file` reads."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.markers import Markers, weighted

__all__ = ["FORMAT"]

_MARKERS = weighted(
    {
        4: "distributed_type compute_environment",
        3: "deepspeed_config megatron_lm_config parallelism_config main_training_function downcast_bf16",
        2: "num_machines machine_rank main_process_port same_network rdzv_backend num_processes",
        1: "fsdp_config mixed_precision",
    }
)

FORMAT = Deferred("accelerate", Markers(_MARKERS))
