"""The keys of DeepSpeed 0.19.8 outside `zero_optimization`, one row each."""

from __future__ import annotations

from collections.abc import Mapping

from unishard_deepspeed.keys import row as v
from unishard_deepspeed.keys.row import (
    CHECKPOINTS,
    OWN_CHECKPOINTS,
    Row,
    decided,
    log,
    other,
    refused,
    removed,
    same,
)

_PARALLEL = "splits ranks in other ways than data parallelism; remove it"
_LOADER = "only affects the DataLoader that deepspeed.initialize makes; use unishard.dataloader"
_CPU_ADAM = "unishard steps the torch optimizer"
_SCALE = "sets DeepSpeed's loss scale, and unishard scales the loss itself; remove it"
_CAST = "casts operations, not parameters; set precision.compute to bf16 or fp16"
_NO_PARALLEL = "only used with expert parallelism"
_ONCE = "the division happens in one place"

_LOOP: dict[str, Row] = {
    "train_batch_size": decided("training.micro_batch_size and training.gradient_accumulation_steps"),
    "train_micro_batch_size_per_gpu": decided("training.micro_batch_size"),
    "gradient_accumulation_steps": decided("training.gradient_accumulation_steps"),
    "gradient_clipping": decided("training.gradient_clipping"),
    "managed_gradient_accumulation": refused(
        "would move the end of an accumulation window; set training.gradient_accumulation_steps",
        constant=False,
        why="a call of step is the end of a window, as in torch",
        ignored="unishard's loop decides where an accumulation window ends",
    ),
    "dataloader_drop_last": refused(_LOADER, ignored="only affects a DataLoader that DeepSpeed makes"),
    "data_efficiency": refused(_LOADER, v.MAPPING),
    "optimizer": decided("optimizer"),
    "scheduler": decided("scheduler"),
    "zero_allow_untested_optimizer": refused(
        "unishard always passes the torch optimizer; remove it",
        constant=True,
        why="DeepSpeed refuses an optimizer that is not on its list",
        ignored="lets DeepSpeed take an optimizer that is not on its list",
    ),
    "zero_force_ds_cpu_optimizer": refused(
        f"needs DeepSpeedCPUAdam, and {_CPU_ADAM}; remove it",
        constant=False,
        why="an offloaded torch optimizer is not replaced by DeepSpeedCPUAdam",
        ignored="whether torch's optimizer may step on the host; same results to rounding",
    ),
}

_PRECISION: dict[str, Row] = {
    "communication_data_type": decided("precision.reduce"),
    "fp16.enabled": decided("precision.compute"),
    "fp16.loss_scale": decided(
        "precision.loss_scale",
        v.number_from(0),
        1.0,
        "unishard scales the loss; 0 would add DeepSpeed's own dynamic scale",
    ),
    "fp16.auto_cast": refused(
        "unishard casts floating inputs to precision.compute; remove it",
        v.SWITCH,
        False,
        "unishard casts inputs, at the units as well as at the root",
        "floating inputs are cast to precision.compute either way",
    ),
    "fp16.fp16_master_weights_and_grads": decided(
        "precision.master", v.SWITCH, False, f"needs DeepSpeedCPUAdam, and {_CPU_ADAM}"
    ),
    "fp16.initial_scale_power": decided("precision.initial_loss_scale", v.count()),
    "fp16.loss_scale_window": decided("precision.loss_scale_growth_interval", v.count()),
    "fp16.hysteresis": refused(_SCALE, v.count()),
    "fp16.consecutive_hysteresis": refused(_SCALE, v.SWITCH, ignored="when DeepSpeed forgives an overflow"),
    "fp16.min_loss_scale": refused(_SCALE, v.count()),
    "torch_autocast": refused(_CAST, constant={"enabled": False}, why="parameters are cast, not operations"),
    "torch_autocast.dtype": refused(_CAST, v.AUTOCAST, ignored="the dtype for torch_autocast.enabled"),
    "torch_autocast.lower_precision_safe_modules": refused(
        _CAST, v.MODULES, ignored="which modules reduce gradients in that dtype; here all do"
    ),
    "bfloat16": decided("precision.compute"),
    "bf16.enabled": decided("precision.compute"),
    "bf16.bf16_master_weights_and_grads": decided("precision.master", v.SWITCH),
    "bf16.bf16_optimizer_states": decided("precision.master", v.SWITCH),
    "bf16.check_grad_overflow": decided("training.nonfinite", v.SWITCH),
    "bf16.immediate_grad_update": same(
        v.SWITCH, False, "gradients are added up after backward", "when gradients are added up; same results"
    ),
    "data_types.param_dtype": decided("precision.compute"),
    "data_types.grad_accum_dtype": decided("precision.accumulate"),
    "data_types.buffer_dtype": decided("precision.buffers", constant=None, why="unishard casts the buffers"),
    "data_types.keep_in_fp32_modules": decided(
        "precision.keep_fp32", v.FP32_BUFFERS, [], "unishard keeps parameters and buffers"
    ),
}

_REDUCTION: dict[str, Row] = {
    "gradient_allreduce_op": refused(
        "would sum gradients instead of averaging them; scale the loss instead",
        constant="mean",
        why="gradients are averaged over the ranks",
    ),
    "prescale_gradients": same(v.FLAG, False, _ONCE),
    "gradient_predivide_factor": same(v.FACTOR, 1.0, _ONCE),
    "disable_allgather": refused("is read by nothing; remove it", ignored="is read by nothing (DeepSpeed 0.19.8)"),
}

_LOGS: dict[str, Row] = {
    "steps_per_print": log(v.COUNT_OR_NULL, None, "unishard has its own progress bar"),
    "wall_clock_breakdown": log(v.FLAG, False, "would wait for the device in every micro-batch"),
    "memory_breakdown": log(v.FLAG, False, "would log in every micro-batch"),
    "dump_state": log(v.FLAG, False, "would log the whole engine"),
    "disable_python_gc": log(v.FLAG),
    "log_level": log(v.LEVEL),
    "vocabulary_size": log(v.COUNT),
    "comms_logger": log(v.COMMS),
    "flops_profiler": log(v.MAPPING),
    "timers": log(v.TIMERS),
    "timers.throughput.enabled": log(v.FLAG, False, "would wait for the device in every step"),
    "tensorboard": log(v.MONITOR),
    "csv_monitor": log(v.MONITOR),
    "wandb": log(v.WANDB),
    "comet": log(v.COMET),
}

_SECTIONS: dict[str, Row] = {
    "activation_checkpointing": same(v.MAPPING, ignored="recomputes nothing by itself; set activation_checkpointing"),
    "aio": same(v.MAPPING),
    "seq_parallel_communication_data_type": refused(
        _PARALLEL, v.REDUCTION, ignored="only used with sequence parallelism"
    ),
    "sequence_parallel_size": refused(_PARALLEL),
    "data_parallel_size": refused(_PARALLEL, ignored="follows from the number of ranks"),
    "tensor_parallel": refused(_PARALLEL),
    "expert_parallel": refused(_PARALLEL),
    "use_data_before_expert_parallelism": refused(_PARALLEL, ignored=_NO_PARALLEL),
    "pipeline": refused("needs a PipelineModule; remove it", v.MAPPING, ignored="only used for a PipelineModule"),
    "hybrid_engine": refused("replaces the engine by one for generation; remove it", v.HYBRID),
    # runtime/engine.py, _do_sanity_check asserts this on every device. DeepCompile itself needs CUDA (compile/util.py,
    # is_deepcompile_supported) and an op that a CUDA compiler builds (ops/op_builder/dc.py).
    "compile": refused(
        "configures DeepCompile, which DeepSpeed 0.19.8 refuses where the loop ends accumulation windows itself, as "
        "unishard's does "
        "(managed_gradient_accumulation: false); remove it, and set compile.mode to per_block for torch.compile",
        v.COMPILED,
    ),
    "autotuning": refused(
        "belongs to the deepspeed launcher; remove it", v.MAPPING, ignored="only used by deepspeed --autotuning"
    ),
    "weight_quantization": refused("belongs to inference; remove it", ignored="only used for inference"),
    "checkpoint": refused(OWN_CHECKPOINTS, v.TAG, ignored=CHECKPOINTS),
    "datastates_ckpt": refused(OWN_CHECKPOINTS, ignored=CHECKPOINTS),
    "amp": removed("set precision.compute to fp16"),
    "elasticity": removed("set training.micro_batch_size and training.gradient_accumulation_steps"),
    "nebula": removed(),
    "compression_training": removed(),
    "quantize_training": removed(),
    "sparse_gradients": removed(),
    "eigenvalue": removed(),
    "sparse_attention": removed(),
    "graph_harvesting": removed(),
    "curriculum_learning": removed(),
    "progressive_layer_drop": removed(),
}

TOP: Mapping[str, Row] = {**_LOOP, **_PRECISION, **_REDUCTION, **_LOGS, **_SECTIONS}
"""By dotted key."""


# -- The keys of `zero_optimization` in DeepSpeed 0.19.8, one row each -----------------------------

_NVME = "belongs to an optimizer in files, which is not supported; remove it"
_SWAPS = "how an optimizer in files is read and written; affects only time"
_TORCH_STEPS = "needs DeepSpeedCPUAdam, and unishard steps the torch optimizer; remove it"

_STAGES: dict[str, Row] = {
    "stage": decided("sharding.strategy"),
    "leaf_module": decided("sharding.units"),
    "leaf_module.classes": decided("sharding.units", v.LEAVES),
    "leaf_module.names": decided("sharding.units", v.LEAVES),
    "leaf_module.name_suffixes": decided("sharding.units", v.LEAVES),
    "reduce_bucket_size": decided("communication.reduce_bucket_size", v.count(1)),
    "overlap_comm": decided("communication.overlap", v.SWITCH_OR_NULL),
    "stage3_module_granularity_threshold": decided("sharding.min_unit_params", v.count()),
    "stage3_max_live_parameters": decided(
        "sharding.reshard_after_forward and communication.prefetch_bucket_size", v.count(0)
    ),
    "stage3_max_reuse_distance": decided("sharding.reshard_after_forward", v.count(0)),
    "stage3_prefetch_bucket_size": decided("communication.prefetch_bucket_size", v.count(0)),
    "contiguous_gradients": same(v.SWITCH, True, "gradients are copied into one buffer for each bucket"),
    "reduce_scatter": same(v.SWITCH, True, "stage 3 reduces to the owner of each shard"),
    "use_multi_rank_bucket_allreduce": same(v.SWITCH, True, "stages 1 and 2: one collective for each bucket"),
    "allgather_partitions": same(v.SWITCH, True, "updated parameters are gathered by all-gather"),
    "allgather_bucket_size": same(v.count(0), 500_000_000, "DeepSpeed's default, elements"),
    "sub_group_size": same(v.count(0), 1_000_000_000, "DeepSpeed's default, elements updated at once at stage 3"),
    "compute_grad_norm": refused("step always reports the norm; remove it", v.SWITCH, True, "step reports the norm"),
    "round_robin_gradients": refused(
        "corrupts the map from parameters to fp32 master weights (DeepSpeed 0.19.8); remove it",
        v.SWITCH,
        False,
        "corrupts the map from parameters to master weights",
        "order in which ranks copy gradients; affects only time",
    ),
    "ignore_unused_parameters": same(v.SWITCH, True, "unishard leaves parameters without gradient out of the update"),
    "stage3_param_persistence_threshold": same(v.count(0), 0, "stage 3 shards small parameters too"),
    "memory_efficient_linear": same(
        v.SWITCH, False, "replaces the process's F.linear by one that adds a bias after rounding"
    ),
    "zero_hpz_partition_size": same(v.count(0), 1, "no second copy of the parameters in smaller groups"),
    "parameter_alignment": same(v.SWITCH),
    "override_module_apply": same(v.SWITCH),
    "log_trace_cache_warnings": same(v.SWITCH),
    "enable_sanity_checks": same(v.SWITCH),
    "stage3_model_persistence_threshold": same(v.count(0)),
    "stage3_use_all_reduce_for_fetch_params": same(v.SWITCH),
    "stage3_allgather_sequential": same(v.SWITCH),
    "stage3_gather_16bit_weights_on_model_save": same(v.SWITCH),
    "zero_quantized_weights": other(v.SWITCH),
    "zero_quantized_nontrainable_weights": other(v.SWITCH),
    "zero_quantized_gradients": other(v.SWITCH),
    "zenflow": refused("changes what the optimizer computes and needs a DeepSpeed optimizer; remove it"),
    "legacy_stage1": refused(
        "was removed in DeepSpeed 0.5.9; remove it", v.SWITCH, ignored="was removed in DeepSpeed 0.5.9"
    ),
    "elastic_checkpoint": refused(OWN_CHECKPOINTS, v.SWITCH, ignored=CHECKPOINTS),
    "load_from_fp32_weights": refused(OWN_CHECKPOINTS, v.SWITCH, ignored=CHECKPOINTS),
    "pipeline_loading_checkpoint": refused(OWN_CHECKPOINTS, v.SWITCH, ignored=CHECKPOINTS),
    "save_muon_momentum_buffer_in_memory": refused(
        "belongs to NVMe offload of Muon; remove it", v.SWITCH, ignored=CHECKPOINTS
    ),
    "stage3_gather_fp16_weights_on_model_save": refused(
        "is deprecated; write stage3_gather_16bit_weights_on_model_save", v.SWITCH, ignored=CHECKPOINTS
    ),
    "mics_shard_size": removed("MiCS has no successor, remove it"),
    "mics_hierarchical_params_gather": removed("MiCS has no successor, remove it"),
    "zeropp_loco_param": removed(),
}

_OFFLOAD: dict[str, Row] = {
    "cpu_offload": decided("offload.optimizer", v.SWITCH_OR_NULL),
    "cpu_offload_param": decided("offload.params", v.SWITCH_OR_NULL),
    "cpu_offload_use_pin_memory": decided("offload.pin_memory", v.SWITCH_OR_NULL),
    "offload_param.device": decided("offload.params", v.DEVICE),
    "offload_param.nvme_path": decided("offload.nvme_path", v.PATH),
    "offload_param.pin_memory": decided("offload.pin_memory", v.SWITCH),
    "offload_param.buffer_count": same(v.count(0)),
    "offload_param.buffer_size": same(v.count(0)),
    "offload_param.max_in_cpu": same(v.count(0)),
    "offload_optimizer.device": decided("offload.optimizer", v.DEVICE),
    "offload_optimizer.nvme_path": decided("offload.nvme_path", v.PATH),
    "offload_optimizer.pin_memory": decided("offload.pin_memory", v.SWITCH),
    "offload_optimizer.buffer_count": same(v.count(0)),
    "offload_optimizer.pipeline_read": refused(_NVME, v.SWITCH, ignored=_SWAPS),
    "offload_optimizer.pipeline_write": refused(_NVME, v.SWITCH, ignored=_SWAPS),
    "offload_optimizer.fast_init": refused(_NVME, v.SWITCH, ignored=_SWAPS),
    "offload_optimizer.ratio": refused(_TORCH_STEPS, v.FRACTION),
    "offload_optimizer.super_offload": refused(
        _TORCH_STEPS, v.SWITCH, ignored="another way to offload the same; affects only time"
    ),
    "offload_optimizer.cpuadam_cores_perc": refused(_TORCH_STEPS, v.FRACTION, ignored="only used with super_offload"),
}

ZERO: Mapping[str, Row] = {f"zero_optimization.{key}": row for key, row in {**_STAGES, **_OFFLOAD}.items()}
"""By dotted key."""
