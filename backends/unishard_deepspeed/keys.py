"""The keys of DeepSpeed 0.19.8, so that `native: {deepspeed: ...}` is checked without importing DeepSpeed.

DeepSpeed itself ignores an unknown key at the top level in silence (runtime/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from unishard.errors import Problem
from unishard.mapping.rules import Fit

__all__ = ["ACCEPTED", "BLOCKS", "DECIDED", "REFUSED", "REMOVED", "SAME_MATHS", "check", "fit"]

BLOCKS = ("zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "bf16", "fp16", "data_types")
"""Mappings whose keys are listed one by one here; every other accepted mapping is handed on as it is."""

_Z = "zero_optimization."
_PARAM, _OPTIMIZER = _Z + "offload_param.", _Z + "offload_optimizer."

ACCEPTED: dict[str, type | tuple[type, ...]] = {
    "gradient_predivide_factor": (int, float),
    "prescale_gradients": bool,
    "steps_per_print": int,
    "wall_clock_breakdown": bool,
    "memory_breakdown": bool,
    "dump_state": bool,
    "disable_python_gc": bool,
    "log_level": str,
    "vocabulary_size": int,
    "activation_checkpointing": dict,
    "comms_logger": dict,
    "flops_profiler": dict,
    "timers": dict,
    "tensorboard": dict,
    "csv_monitor": dict,
    "wandb": dict,
    "comet": dict,
    "data_types.keep_in_fp32_modules": (list, str),
    "bf16.immediate_grad_update": bool,
    _Z + "contiguous_gradients": bool,
    _Z + "reduce_scatter": bool,
    _Z + "use_multi_rank_bucket_allreduce": bool,
    _Z + "allgather_partitions": bool,
    _Z + "allgather_bucket_size": int,
    _Z + "sub_group_size": int,
    _Z + "ignore_unused_parameters": bool,
    _Z + "parameter_alignment": bool,
    _Z + "memory_efficient_linear": bool,
    _Z + "override_module_apply": bool,
    _Z + "log_trace_cache_warnings": bool,
    _Z + "enable_sanity_checks": bool,
    _Z + "stage3_param_persistence_threshold": int,
    _Z + "stage3_model_persistence_threshold": int,
    _Z + "stage3_use_all_reduce_for_fetch_params": bool,
    _Z + "stage3_allgather_sequential": bool,
    _Z + "stage3_gather_16bit_weights_on_model_save": bool,
    _Z + "zero_hpz_partition_size": int,
    _Z + "zero_quantized_weights": bool,
    _Z + "zero_quantized_nontrainable_weights": bool,
    _Z + "zero_quantized_gradients": bool,
    _PARAM + "buffer_count": int,
    _PARAM + "buffer_size": int,
    _PARAM + "max_in_cpu": int,
    _OPTIMIZER + "buffer_count": int,
    "aio": dict,
}
"""Keys that may be set, and the type of their value."""

SAME_MATHS = frozenset(
    {
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "disable_python_gc",
        "log_level",
        "comms_logger",
        "flops_profiler",
        "timers",
        "tensorboard",
        "csv_monitor",
        "wandb",
        "comet",
        _Z + "contiguous_gradients",
        _Z + "reduce_scatter",
        _Z + "use_multi_rank_bucket_allreduce",
        _Z + "allgather_partitions",
        _Z + "allgather_bucket_size",
        _Z + "sub_group_size",
        _Z + "log_trace_cache_warnings",
        _Z + "enable_sanity_checks",
        _Z + "stage3_param_persistence_threshold",
        _Z + "stage3_model_persistence_threshold",
        _Z + "stage3_use_all_reduce_for_fetch_params",
        _Z + "stage3_allgather_sequential",
        _Z + "stage3_gather_16bit_weights_on_model_save",
        _PARAM + "buffer_count",
        _PARAM + "buffer_size",
        _PARAM + "max_in_cpu",
        _OPTIMIZER + "buffer_count",
        "aio",
    }
)
"""Accepted keys that are about time, memory, the shape of collectives or logs alone; any other may train something else."""

DECIDED: dict[str, str] = {
    "train_batch_size": "training.micro_batch_size and training.gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "training.gradient_clipping",
    "communication_data_type": "precision.reduce",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "bfloat16": "precision.compute",
    "bf16.enabled": "precision.compute",
    "bf16.bf16_master_weights_and_grads": "precision.master",
    "bf16.bf16_optimizer_states": "precision.master",
    "fp16.enabled": "precision.compute",
    "fp16.loss_scale": "precision.loss_scale",
    "fp16.initial_scale_power": "precision.initial_loss_scale",
    "fp16.loss_scale_window": "precision.loss_scale_growth_interval",
    "fp16.fp16_master_weights_and_grads": "precision.master",
    "data_types.param_dtype": "precision.compute",
    "data_types.grad_accum_dtype": "precision.accumulate",
    "data_types.buffer_dtype": "precision.buffers",
    "bf16.check_grad_overflow": "training.nonfinite",
    "dataloader_drop_last": "training.last_window",
    _Z + "stage": "sharding.strategy",
    _Z + "leaf_module": "sharding.units",
    _Z + "stage3_module_granularity_threshold": "sharding.min_unit_params",
    _Z + "stage3_max_live_parameters": "sharding.reshard_after_forward and communication.prefetch_bucket_size",
    _Z + "stage3_max_reuse_distance": "sharding.reshard_after_forward",
    _Z + "stage3_prefetch_bucket_size": "communication.prefetch_bucket_size",
    _Z + "reduce_bucket_size": "communication.reduce_bucket_size",
    _Z + "overlap_comm": "communication.overlap",
    _Z + "cpu_offload": "offload.optimizer",
    _Z + "cpu_offload_param": "offload.params",
    _Z + "cpu_offload_use_pin_memory": "offload.pin_memory",
    _PARAM + "device": "offload.params",
    _PARAM + "nvme_path": "offload.nvme_path",
    _PARAM + "pin_memory": "offload.pin_memory",
    _OPTIMIZER + "device": "offload.optimizer",
    _OPTIMIZER + "nvme_path": "offload.nvme_path",
    _OPTIMIZER + "pin_memory": "offload.pin_memory",
}
"""Keys that a field decides: the field to set instead."""

_DATA = "reads deepspeed.initialize's own loader; use unishard.dataloader"
_NVME = "belongs to an optimizer in files, which unishard refuses; remove it"
_CPU_ADAM = "needs DeepSpeedCPUAdam, and unishard steps the torch optimizer; remove it"
_SCALE = "belongs to DeepSpeed's loss scale, and unishard scales the loss by torch's rule on every engine; remove it"
_PARALLEL = "splits ranks in other ways than data parallelism, which unishard would not see; remove it"

REFUSED: dict[str, str] = {
    "managed_gradient_accumulation": "would move the end of a window away from step; set training.gradient_accumulation_steps",
    "gradient_allreduce_op": "would add gradients up instead of averaging them; scale the loss instead",
    "zero_allow_untested_optimizer": "unishard always passes the torch optimizer; remove it",
    "zero_force_ds_cpu_optimizer": _CPU_ADAM,
    "torch_autocast": "would cast operations instead of parameters; set precision.compute to bf16 or fp16",
    "fp16.auto_cast": "unishard casts floating inputs to the compute format; remove it",
    "fp16.hysteresis": _SCALE,
    "fp16.consecutive_hysteresis": _SCALE,
    "fp16.min_loss_scale": _SCALE,
    "seq_parallel_communication_data_type": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "data_parallel_size": _PARALLEL,
    "tensor_parallel": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "use_data_before_expert_parallelism": _PARALLEL,
    "pipeline": "needs a PipelineModule; remove it",
    "hybrid_engine": "replaces the engine by one for generation; remove it",
    "compile": "DeepCompile cannot run without managed gradient accumulation; remove it, and set compile for torch.compile",
    "autotuning": "belongs to the deepspeed launcher; remove it",
    "weight_quantization": "belongs to inference; remove it",
    "data_efficiency": _DATA,
    "disable_allgather": "is read by nothing; remove it",
    "checkpoint": "belongs to DeepSpeed's own checkpoints; remove it",
    "datastates_ckpt": "belongs to DeepSpeed's own checkpoints; remove it",
    _Z + "round_robin_gradients": "corrupts the map from parameters to their fp32 masters (DeepSpeed 0.19.8); remove it",
    _Z + "compute_grad_norm": "step always reports the norm; remove it",
    _Z + "zenflow": "changes the optimizer's maths and needs a DeepSpeed optimizer; remove it",
    _Z + "legacy_stage1": "was taken out in DeepSpeed 0.5.9; remove it",
    _Z + "elastic_checkpoint": "belongs to DeepSpeed's own checkpoints; remove it",
    _Z + "load_from_fp32_weights": "belongs to DeepSpeed's own checkpoints; remove it",
    _Z + "pipeline_loading_checkpoint": "belongs to DeepSpeed's own checkpoints; remove it",
    _Z + "save_muon_momentum_buffer_in_memory": "belongs to NVMe offload of Muon; remove it",
    _Z + "stage3_gather_fp16_weights_on_model_save": "is deprecated; write stage3_gather_16bit_weights_on_model_save",
    _OPTIMIZER + "pipeline_read": _NVME,
    _OPTIMIZER + "pipeline_write": _NVME,
    _OPTIMIZER + "fast_init": _NVME,
    _OPTIMIZER + "ratio": _CPU_ADAM,
    _OPTIMIZER + "super_offload": _CPU_ADAM,
    _OPTIMIZER + "cpuadam_cores_perc": _CPU_ADAM,
}
"""Keys that would break what unishard promises: the reason, and what instead."""

_GONE = "has left DeepSpeed 0.19.8 (DeepSpeed issue 8489); "

REMOVED: dict[str, str] = {
    **dict.fromkeys(
        (
            "nebula",
            "compression_training",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
            _Z + "zeropp_loco_param",
        ),
        _GONE + "remove it",
    ),
    "amp": _GONE + "set precision.compute to fp16",
    "elasticity": _GONE + "set training.micro_batch_size and training.gradient_accumulation_steps",
    _Z + "mics_shard_size": _GONE + "MiCS has no successor, remove it",
    _Z + "mics_hierarchical_params_gather": _GONE + "MiCS has no successor, remove it",
}
"""Keys of older versions, an error in DeepSpeed 0.19.8 even where they switch something off."""


def check(native: Mapping[str, Any], prefix: str = "") -> list[Problem]:
    """Everything that is wrong with the keys a user sets, by dotted path."""
    problems: list[Problem] = []
    for name, value in native.items():
        key = f"{prefix}{name}"
        if key in BLOCKS and isinstance(value, Mapping):
            problems += check(value, f"{key}.")
        elif what := _complaint(key, value):
            problems.append(Problem(f"native.deepspeed.{key}", what))
    return problems


def fit(key: str) -> tuple[Fit, str]:
    """The fit and the note of an accepted key, dotted; keys inside a mapping that is handed on count as that mapping."""
    parts = key.split(".")
    if any(".".join(parts[:length]) in SAME_MATHS for length in range(1, len(parts) + 1)):
        return Fit.EQUIVALENT, "your own setting, about time, memory or logs; the maths stays"
    return Fit.APPROXIMATE, "only DeepSpeed has this setting, so another backend trains without it"


def _complaint(key: str, value: Any) -> str | None:
    if key in DECIDED:
        return f"is decided by a field; set {DECIDED[key]} instead"
    if key in REFUSED or key in REMOVED:
        return {**REFUSED, **REMOVED}[key]
    if key in BLOCKS:
        return f"must be a mapping of keys, got {type(value).__name__}; write its keys below it"
    if key not in ACCEPTED:
        return _unknown(key)
    wanted = ACCEPTED[key]
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    # True is an int in Python, but not in JSON.
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return None
    return f"must be {' or '.join(kind.__name__ for kind in kinds)}, got {type(value).__name__}; write a value of that type"


def _unknown(key: str) -> str:
    where, _, name = key.rpartition(".")
    known = [*ACCEPTED, *DECIDED, *REFUSED, *BLOCKS]
    beside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == where]
    near = get_close_matches(name, beside, 1, 0.75)
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    if near:
        field = DECIDED.get(f"{where}.{near[0]}" if where else near[0])
        meant = f"{near[0]!r}, which {field} decides" if field else repr(near[0])
        return f"unknown to DeepSpeed 0.19.8; did you mean {meant}?"
    if elsewhere:
        return f"unknown to DeepSpeed 0.19.8; did you mean {elsewhere[0]!r}?"
    return "unknown to DeepSpeed 0.19.8; remove it"
