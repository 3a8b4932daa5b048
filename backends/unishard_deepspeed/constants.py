"""The keys of DeepSpeed 0.19.8 that no field decides, and that are written all the same: nothing is left to a default that changes."""

from __future__ import annotations

from typing import Any

__all__ = ["CONSTANTS"]

CONSTANTS: dict[str, tuple[Any, str]] = {
    "managed_gradient_accumulation": (False, "a call of step is the end of a window, as in torch"),
    "zero_allow_untested_optimizer": (True, "unishard passes the torch optimizer; DeepSpeed only lists the ones it knows"),
    "zero_force_ds_cpu_optimizer": (False, "an offloaded torch optimizer is not replaced by DeepSpeedCPUAdam"),
    "fp16.loss_scale": (1.0, "unishard scales the loss; 0 would add DeepSpeed's own dynamic scale"),
    "fp16.auto_cast": (False, "unishard casts inputs, at the units as well as at the root"),
    "fp16.fp16_master_weights_and_grads": (False, "needs DeepSpeedCPUAdam, and unishard steps the torch optimizer"),
    "torch_autocast": ({"enabled": False}, "parameters are cast, not operations"),
    "bf16.immediate_grad_update": (False, "gradients are added up after backward"),
    "data_types.buffer_dtype": (None, "precision.buffers is done before"),
    "data_types.keep_in_fp32_modules": ([], "buffers keep their dtype"),
    "gradient_allreduce_op": ("mean", "gradients are averaged over the ranks"),
    "prescale_gradients": (False, "the division happens in one place"),
    "gradient_predivide_factor": (1.0, "the division happens in one place"),
    "steps_per_print": (None, "unishard has its own progress"),
    "wall_clock_breakdown": (False, "would wait for the device in every micro-batch"),
    "memory_breakdown": (False, "would log in every micro-batch"),
    "dump_state": (False, "would log the whole engine"),
    "timers.throughput.enabled": (False, "would wait for the device in every step"),
    "zero_optimization.contiguous_gradients": (True, "gradients are copied into one buffer for each bucket"),
    "zero_optimization.reduce_scatter": (True, "stage 3 reduces to the owner of each part"),
    "zero_optimization.use_multi_rank_bucket_allreduce": (True, "stages 1 and 2: one collective for each bucket"),
    "zero_optimization.allgather_partitions": (True, "updated parameters are gathered by all-gather"),
    "zero_optimization.allgather_bucket_size": (500_000_000, "DeepSpeed's default, elements"),
    "zero_optimization.sub_group_size": (1_000_000_000, "DeepSpeed's default, elements updated at once at stage 3"),
    "zero_optimization.compute_grad_norm": (True, "step reports the norm"),
    "zero_optimization.round_robin_gradients": (False, "corrupts the map from parameters to masters"),
    "zero_optimization.ignore_unused_parameters": (True, "unishard leaves parameters without gradient out of the update"),
    "zero_optimization.stage3_param_persistence_threshold": (0, "stage 3 shards small parameters too"),
    "zero_optimization.memory_efficient_linear": (False, "replaces torch's linear by one that rounds otherwise in bf16"),
    "zero_optimization.zero_hpz_partition_size": (1, "no secondary copy of the parameters"),
}
