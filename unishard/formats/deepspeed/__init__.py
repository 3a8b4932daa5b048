"""The JSON file of `deepspeed.initialize`."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.markers import Markers, weighted

__all__ = ["FORMAT"]

_MARKERS = weighted(
    {
        3: (
            "zero_optimization train_micro_batch_size_per_gpu train_batch_size zero_allow_untested_optimizer "
            "zero_force_ds_cpu_optimizer communication_data_type compile.deepcompile"
        ),
        2: (
            "steps_per_print wall_clock_breakdown fp16.enabled bf16.enabled bfloat16 gradient_clipping optimizer.type "
            "optimizer.params scheduler.type compression_training autotuning data_efficiency aio"
        ),
        1: "fp16 bf16 gradient_accumulation_steps optimizer scheduler activation_checkpointing tensorboard",
    }
)

FORMAT = Deferred("deepspeed", Markers(_MARKERS))
