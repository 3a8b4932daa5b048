"""Configs of engines that ms-swift brings along, by the names that people write (ms-swift 4.6, swift/config)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEEPSPEED", "FSDP"]

_BOTH: Mapping[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
_BUCKETS: Mapping[str, Any] = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_THREE: Mapping[str, Any] = {
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def _config(stage: int, device: str | None, **settings: Any) -> Mapping[str, Any]:
    places = ("offload_optimizer", "offload_param")[: 2 if stage == 3 else 1]
    offload = {name: {"device": device, "pin_memory": True} for name in places} if device else {}
    return {**_BOTH, "zero_optimization": {"stage": stage, **offload, **settings}}


_PLAIN = {"zero_quantized_weights": False, "zero_quantized_gradients": False}

DEEPSPEED: Mapping[str, Mapping[str, Any]] = {
    "zero0": _config(0, None, **_BUCKETS),
    "zero1": _config(1, "none", **_BUCKETS),
    "zero2": _config(2, "none", **_BUCKETS),
    "zero3": _config(3, "none", **_THREE, **_PLAIN),
    "zero2_offload": _config(2, "cpu", **_BUCKETS),
    "zero3_offload": _config(3, "cpu", **_THREE),
}

FSDP: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_ram_efficient_loading": True,
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": True,
        },
    }
}
