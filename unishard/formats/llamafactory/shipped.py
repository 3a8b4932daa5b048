"""Configs of DeepSpeed that LLaMA-Factory brings along (0.9, examples/deepspeed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.formats.hf.shipped import Shipped, filled_in

__all__ = ["SHIPPED"]

_FOLDER = "examples/deepspeed"
_SCALE = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_BUCKETS = {"allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8, "round_robin_gradients": True}
_AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
_THREE = {**_AUTO, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_CPU = {"device": "cpu", "pin_memory": True}


def _config(stage: int, offloaded: tuple[str, ...] = (), **more: Any) -> Mapping[str, Any]:
    last = {**_THREE, "stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else _BUCKETS
    zero = {
        "stage": stage,
        **dict.fromkeys(offloaded, _CPU),
        "overlap_comm": False,
        "contiguous_gradients": True,
        **last,
    }
    return filled_in(zero, fp16=_SCALE, zero_allow_untested_optimizer=True, **more)


SHIPPED: Shipped = {
    f"{_FOLDER}/ds_z0_config.json": _config(0),
    f"{_FOLDER}/ds_z2_config.json": _config(2),
    f"{_FOLDER}/ds_z2_offload_config.json": _config(2, ("offload_optimizer",)),
    f"{_FOLDER}/ds_z2_autotp_config.json": _config(2, tensor_parallel={"autotp_size": 2}),
    f"{_FOLDER}/ds_z3_config.json": _config(3),
    f"{_FOLDER}/ds_z3_offload_config.json": _config(3, ("offload_optimizer", "offload_param")),
}
"""By path."""
