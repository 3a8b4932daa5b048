"""The keys of `zero_optimization` in DeepSpeed 0.19.8, one row each."""

from __future__ import annotations

from collections.abc import Mapping

from unishard_deepspeed.keys import values
from unishard_deepspeed.keys.row import Row, decided, other, refused, removed, same
from unishard_deepspeed.keys.values import CHECKPOINTS, FILES, OWN_CHECKPOINTS, SWAPS

_TORCH_STEPS = "needs DeepSpeedCPUAdam, and unishard steps the torch optimizer; remove it"

_STAGES: dict[str, Row] = {
    "stage": decided("sharding.strategy"),
    "leaf_module": decided("sharding.units"),
    "leaf_module.classes": decided("sharding.units", values.LEAVES),
    "leaf_module.names": decided("sharding.units", values.LEAVES),
    "leaf_module.name_suffixes": decided("sharding.units", values.LEAVES),
    "reduce_bucket_size": decided("communication.reduce_bucket_size", values.count(1)),
    "overlap_comm": decided("communication.overlap", values.SWITCH_OR_NULL),
    "stage3_module_granularity_threshold": decided("sharding.min_unit_params", values.count()),
    "stage3_max_live_parameters": decided(
        "sharding.reshard_after_forward and communication.prefetch_bucket_size", values.count(0)
    ),
    "stage3_max_reuse_distance": decided("sharding.reshard_after_forward", values.count(0)),
    "stage3_prefetch_bucket_size": decided("communication.prefetch_bucket_size", values.count(0)),
    "contiguous_gradients": same(values.SWITCH, True, "gradients are copied into one buffer for each bucket"),
    "reduce_scatter": same(values.SWITCH, True, "stage 3 reduces to the owner of each shard"),
    "use_multi_rank_bucket_allreduce": same(values.SWITCH, True, "stages 1 and 2: one collective for each bucket"),
    "allgather_partitions": same(values.SWITCH, True, "updated parameters are gathered by all-gather"),
    "allgather_bucket_size": same(values.count(0), 500_000_000, "DeepSpeed's default, elements"),
    "sub_group_size": same(values.count(0), 1_000_000_000, "DeepSpeed's default, elements updated at once at stage 3"),
    "compute_grad_norm": refused(
        "step always reports the norm; remove it", values.SWITCH, True, "step reports the norm"
    ),
    "round_robin_gradients": refused(
        "corrupts the map from parameters to fp32 master weights (DeepSpeed 0.19.8); remove it",
        values.SWITCH,
        False,
        "corrupts the map from parameters to master weights",
        "order in which ranks copy gradients; affects only time",
    ),
    "ignore_unused_parameters": same(
        values.SWITCH, True, "unishard leaves parameters without gradient out of the update"
    ),
    "stage3_param_persistence_threshold": same(values.count(0), 0, "stage 3 shards small parameters too"),
    "memory_efficient_linear": same(
        values.SWITCH, False, "replaces the process's F.linear by one that adds a bias after rounding"
    ),
    "zero_hpz_partition_size": same(values.count(0), 1, "no second copy of the parameters in smaller groups"),
    "parameter_alignment": same(values.SWITCH),
    "override_module_apply": same(values.SWITCH),
    "log_trace_cache_warnings": same(values.SWITCH),
    "enable_sanity_checks": same(values.SWITCH),
    "stage3_model_persistence_threshold": same(values.count(0)),
    "stage3_use_all_reduce_for_fetch_params": same(values.SWITCH),
    "stage3_allgather_sequential": same(values.SWITCH),
    "stage3_gather_16bit_weights_on_model_save": same(values.SWITCH),
    "zero_quantized_weights": other(values.SWITCH),
    "zero_quantized_nontrainable_weights": other(values.SWITCH),
    "zero_quantized_gradients": other(values.SWITCH),
    "zenflow": refused("changes what the optimizer computes and needs a DeepSpeed optimizer; remove it"),
    "legacy_stage1": refused(
        "was removed in DeepSpeed 0.5.9; remove it", values.SWITCH, ignored="was removed in DeepSpeed 0.5.9"
    ),
    "elastic_checkpoint": refused(OWN_CHECKPOINTS, values.SWITCH, ignored=CHECKPOINTS),
    "load_from_fp32_weights": refused(OWN_CHECKPOINTS, values.SWITCH, ignored=CHECKPOINTS),
    "pipeline_loading_checkpoint": refused(OWN_CHECKPOINTS, values.SWITCH, ignored=CHECKPOINTS),
    "save_muon_momentum_buffer_in_memory": refused(
        "belongs to NVMe offload of Muon; remove it", values.SWITCH, ignored=CHECKPOINTS
    ),
    "stage3_gather_fp16_weights_on_model_save": refused(
        "is deprecated; write stage3_gather_16bit_weights_on_model_save", values.SWITCH, ignored=CHECKPOINTS
    ),
    "mics_shard_size": removed("MiCS has no successor, remove it"),
    "mics_hierarchical_params_gather": removed("MiCS has no successor, remove it"),
    "zeropp_loco_param": removed(),
}

_OFFLOAD: dict[str, Row] = {
    "cpu_offload": decided("offload.optimizer", values.SWITCH_OR_NULL),
    "cpu_offload_param": decided("offload.params", values.SWITCH_OR_NULL),
    "cpu_offload_use_pin_memory": decided("offload.pin_memory", values.SWITCH_OR_NULL),
    "offload_param.device": decided("offload.params", values.DEVICE),
    "offload_param.nvme_path": decided("offload.nvme_path", values.PATH),
    "offload_param.pin_memory": decided("offload.pin_memory", values.SWITCH),
    "offload_param.buffer_count": refused(FILES, values.count(0), ignored=SWAPS),
    "offload_param.buffer_size": refused(FILES, values.count(0), ignored=SWAPS),
    "offload_param.max_in_cpu": refused(FILES, values.count(0), ignored=SWAPS),
    "offload_optimizer.device": decided("offload.optimizer", values.DEVICE),
    "offload_optimizer.nvme_path": decided("offload.nvme_path", values.PATH),
    "offload_optimizer.pin_memory": decided("offload.pin_memory", values.SWITCH),
    "offload_optimizer.buffer_count": refused(FILES, values.count(0), ignored=SWAPS),
    "offload_optimizer.pipeline_read": refused(FILES, values.SWITCH, ignored=SWAPS),
    "offload_optimizer.pipeline_write": refused(FILES, values.SWITCH, ignored=SWAPS),
    "offload_optimizer.fast_init": refused(FILES, values.SWITCH, ignored=SWAPS),
    "offload_optimizer.ratio": refused(_TORCH_STEPS, values.FRACTION),
    "offload_optimizer.super_offload": refused(
        _TORCH_STEPS, values.SWITCH, ignored="another way to offload the same; affects only time"
    ),
    "offload_optimizer.cpuadam_cores_perc": refused(
        _TORCH_STEPS, values.FRACTION, ignored="only used with super_offload"
    ),
}

ZERO: Mapping[str, Row] = {f"zero_optimization.{key}": row for key, row in {**_STAGES, **_OFFLOAD}.items()}
"""By dotted key."""
