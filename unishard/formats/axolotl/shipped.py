"""Configs of DeepSpeed that axolotl brings along (deepspeed_configs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.formats.hf.shipped import Shipped, filled_in

__all__ = ["SHIPPED"]

_FOLDER = "deepspeed_configs"
_SCALE = {
    "enabled": "auto",
    "loss_scale": 0,
    "initial_scale_power": 32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
_THREE: Mapping[str, Any] = {
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
    **_AUTO,
}
_CPU = {"device": "cpu", "pin_memory": True}
_TWO = {"offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True}
_COMPILED: Mapping[str, Any] = {"compile": {"disable": False, "backend": "inductor"}}
_THEIR_OPTIMIZER: Mapping[str, Any] = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def _config(stage: int, zero: Mapping[str, Any], *, bf16: bool = False, **more: Any) -> Mapping[str, Any]:
    found = filled_in({"stage": stage, **zero, "overlap_comm": True}, fp16=_SCALE, **more)
    return (
        {key: value for key, value in found.items() if key != "fp16"} | {"bf16": {"enabled": True}} if bf16 else found
    )


SHIPPED: Shipped = {
    f"{_FOLDER}/zero1.json": _config(1, {}),
    f"{_FOLDER}/zero1_torch_compile.json": _config(1, {}, **_COMPILED),
    f"{_FOLDER}/zero2.json": _config(2, _TWO),
    f"{_FOLDER}/zero2_torch_compile.json": _config(2, _TWO, **_COMPILED),
    f"{_FOLDER}/zero3.json": _config(3, _THREE),
    f"{_FOLDER}/zero3_bf16.json": _config(3, _THREE, bf16=True),
    f"{_FOLDER}/zero3_bf16_cpuoffload_params.json": _config(
        3, {**_THREE, "offload_param": _CPU}, bf16=True, **_THEIR_OPTIMIZER
    ),
    f"{_FOLDER}/zero3_bf16_cpuoffload_all.json": _config(
        3, {**_THREE, "offload_optimizer": _CPU, "offload_param": _CPU}, bf16=True, **_THEIR_OPTIMIZER
    ),
}
"""By path."""
