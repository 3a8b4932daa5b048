"""What values DeepSpeed 0.19.8 takes for keys that are repeated as they are, or handed on.

It refuses one of another type even where nothing reads the key (runtime/zero/config.py, offload_config.py, runtime/precision_config.py,
monitor/config.py, comm/config.py, compile/config.py: pydantic's models; runtime/config.py: plain mappings).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.mapping.entries import Unreadable
from unishard.mapping.express import AUTO
from unishard.mapping.key_rows import boolean, integer, number, one_of
from unishard_deepspeed.arguments.facts import dtype

__all__ = ["VALUES"]

Accepts = Callable[[Any], Any]


def _or_auto(accepts: Accepts) -> Accepts:
    """DeepSpeed's models leave out a key that is `"auto"` (runtime/config_utils.py, DeepSpeedConfigModel)."""
    return lambda value: None if isinstance(value, str) and value == AUTO else accepts(value)


def _or_null(accepts: Accepts) -> Accepts:
    return lambda value: None if value is None else accepts(value)


def _whole(low: float = -math.inf) -> Accepts:
    def accepts(value: Any) -> None:
        found = integer(low)(value)
        if isinstance(value, str) and not value.strip().lstrip("+-").isdecimal():
            raise Unreadable(f"must be a whole number in digits, got {shown(value)}; write {found}")

    return _or_auto(accepts)


def _string(value: Any) -> None:
    if not isinstance(value, str):
        raise Unreadable(f"must be text, got {shown(value)}; write some")


def _list(value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise Unreadable(f"must be a list, got {shown(value)}; write [...]")


def _names(value: Any) -> None:
    if not isinstance(value, str):
        _list(value)
        for name in value:
            _string(name)


def _mapping(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise Unreadable(f"must be a mapping of keys, got {shown(value)}; write its keys below it, or remove it")


def _block(rows: Mapping[str, Accepts], *, strict: bool = True) -> Accepts:
    """A mapping that is one value here.

    Args:
        rows: What its keys take.
        strict: Whether DeepSpeed refuses a key that it does not know.
    """

    def accepts(value: Any) -> None:
        _mapping(value)
        for name, item in value.items():
            if name not in rows and strict:
                raise Unreadable(f"must have no key {shown(name)}, which DeepSpeed 0.19.8 does not know; remove it")
            try:
                if name in rows:
                    rows[name](item)
            except Unreadable as error:
                raise Unreadable(f"{error} ({name})") from None

    return accepts


_SWITCH = _or_auto(boolean)
_TEXT = _or_null(_string)
_SHARE = _or_auto(number(0, 1))
_FORMAT = _or_null(one_of(dict.fromkeys(("fp32", "fp16", "bf16"))))
_LOG = {"enabled": _SWITCH, "output_path": _string, "job_name": _string}
_Z, _PARAM, _OPTIMIZER = "zero_optimization.", "zero_optimization.offload_param.", "zero_optimization.offload_optimizer."


def _below(prefix: str, words: str, accepts: Accepts) -> dict[str, Accepts]:
    return {f"{prefix}{word}": accepts for word in words.split()}


_AT_3 = {
    **_below(
        "stage3_",
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance",
        _whole(0),
    ),
    **_below("stage3_", "module_granularity_threshold", _whole()),
    **_below("stage3_", "gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential", _SWITCH),
}

VALUES: Mapping[str, Accepts] = {
    **_below("fp16.", "auto_cast consecutive_hysteresis fp16_master_weights_and_grads", _SWITCH),
    **_below("fp16.", "initial_scale_power loss_scale_window hysteresis min_loss_scale", _whole()),
    "fp16.loss_scale": _or_auto(number(0)),
    **{
        f"{block}.{name}": _SWITCH
        for block in ("bf16", "bfloat16")
        for name in ("immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    },
    "torch_autocast.dtype": dtype,
    "torch_autocast.lower_precision_safe_modules": _names,
    "seq_parallel_communication_data_type": _FORMAT,
    **{f"{_Z}{name}": accepts for name, accepts in _AT_3.items()},
    **{f"{_Z}{name.removeprefix('stage3_')}": accepts for name, accepts in _AT_3.items()},
    f"{_Z}stage3_gather_fp16_weights_on_model_save": _SWITCH,
    **_below(
        _Z,
        "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint "
        "override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
        _SWITCH,
    ),
    **_below(_Z, "overlap_comm cpu_offload cpu_offload_param cpu_offload_use_pin_memory", _or_null(_SWITCH)),
    **_below(_Z, "allgather_bucket_size sub_group_size zero_hpz_partition_size", _whole(0)),
    f"{_Z}reduce_bucket_size": _whole(1),
    **_below(f"{_Z}leaf_module.", "classes names name_suffixes", _or_auto(_names)),
    **_below(_PARAM, "buffer_count buffer_size max_in_cpu", _whole(0)),
    **_below(_OPTIMIZER, "buffer_count", _whole(0)),
    **_below(_OPTIMIZER, "pipeline_read pipeline_write fast_init super_offload", _SWITCH),
    **_below(_OPTIMIZER, "ratio cpuadam_cores_perc", _SHARE),
    **{f"{block}pin_memory": _SWITCH for block in (_PARAM, _OPTIMIZER)},
    **{f"{block}nvme_path": _or_null(_or_auto(_string)) for block in (_PARAM, _OPTIMIZER)},
    **{f"{block}device": _or_auto(one_of(dict.fromkeys(("none", "cpu", "nvme")))) for block in (_PARAM, _OPTIMIZER)},
    "tensorboard": _or_auto(_block(_LOG)),
    "csv_monitor": _or_auto(_block(_LOG)),
    "wandb": _or_auto(_block({"enabled": _SWITCH, "group": _TEXT, "team": _TEXT, "project": _string})),
    "comet": _or_auto(
        _block(
            {
                "enabled": _SWITCH,
                "samples_log_interval": _whole(),
                **_below("", "project workspace api_key experiment_name experiment_key mode", _TEXT),
                "online": _or_null(_SWITCH),
            }
        )
    ),
    "comms_logger": _block({**_below("", "enabled prof_all verbose debug", _SWITCH), "prof_ops": _list}),
    "timers": _block({"throughput": _block(_below("", "enabled synchronized", _SWITCH))}, strict=False),
    "hybrid_engine": _block(
        {
            **_below("", "enabled release_inference_cache pin_parameters enable_cuda_graph", _SWITCH),
            **_below("", "inference_tp_size tp_gather_partition_size", _whole()),
            "max_out_tokens": _whole(1),
        }
    ),
    "compile": _block(
        {
            **_below(
                "",
                "deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory offload_opt_states "
                "double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
                "sync_after_allgather keep_int_input_tensors keep_all_input_tensors",
                _SWITCH,
            ),
            "free_activation_threshold": _whole(),
            "passes": _or_null(_list),
        }
    ),
    **dict.fromkeys(("activation_checkpointing", "flops_profiler", "autotuning", "aio", "pipeline", "data_efficiency"), _mapping),
    "checkpoint": _block({"tag_validation": one_of(dict.fromkeys(("ignore", "warn", "fail")))}, strict=False),
}
"""By dotted key; DeepSpeed does not look at the value of any other."""
