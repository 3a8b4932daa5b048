"""Names and classes of Lightning's strategies (2.6.6, pytorch/strategies and fabric/strategies), and what each runs."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Unreadable
from unishard.formats.lightning.built import Built, short
from unishard.formats.names import each

_NVME = {
    "stage": 3,
    "offload_optimizer": True,
    "offload_parameters": True,
    "remote_device": "nvme",
    "offload_params_device": "nvme",
    "offload_optimizer_device": "nvme",
}
NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "auto": ("DDPStrategy", {}),
    "ddp": ("DDPStrategy", {}),
    **{
        f"ddp{start}{unused}": ("DDPStrategy", {})
        for start in ("", "_spawn", "_fork", "_notebook")
        for unused in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
    },
    "single_device": ("DDPStrategy", {}),
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_1_offload": ("DeepSpeedStrategy", {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": (
        "DeepSpeedStrategy",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
    "deepspeed_stage_3_offload_nvme": ("DeepSpeedStrategy", _NVME),
}
"""What each name of the registry runs, and the arguments that it stands for."""

_SHARDED = "Lightning 2 has removed FairScale; write deepspeed_stage_2, which shards the same"
_NO_DEVICE = "only CUDA devices and CPUs are supported; write ddp, fsdp or deepspeed"
_NEVER: Mapping[str, str] = {
    "dp": "Lightning 2 has removed DataParallel; write ddp",
    "ddp2": "Lightning 2 has removed it; write ddp",
    "ddp_cpu": "Lightning 2 has removed it; write ddp and accelerator: cpu",
    "ddp_find_unused_parameters": "Lightning 2 has renamed it; write ddp_find_unused_parameters_true",
    **each("ddp_sharded ddp_sharded_spawn", _SHARDED),
    "fsdp_fairscale": "Lightning 2 has removed FairScale; write fsdp",
    "fsdp_native": "Lightning 2 has renamed it; write fsdp",
    "fsdp_native_full_shard_offload": "Lightning 2 has renamed it; write fsdp_cpu_offload",
    "horovod": "Lightning 2 has removed Horovod; write ddp",
    "colossalai": "Colossal-AI is not supported; write deepspeed_stage_3 or fsdp",
    "bagua": "Bagua is not supported; write ddp",
    **each("xla xla_debug xla_fsdp single_xla single_tpu tpu_spawn hpu_parallel hpu_single", _NO_DEVICE),
}
_RENAMED_CLASSES: Mapping[str, str] = {
    "DDPFullyShardedNativeStrategy": "FSDPStrategy",
    "DDPPlugin": "DDPStrategy",
    "DeepSpeedPlugin": "DeepSpeedStrategy",
}
"""Classes of Lightning 1."""
CLASSES: Mapping[str, str] = {
    "DDPStrategy": "DDPStrategy",
    "SingleDeviceStrategy": "DDPStrategy",
    "FSDPStrategy": "FSDPStrategy",
    "DeepSpeedStrategy": "DeepSpeedStrategy",
    "ModelParallelStrategy": "ModelParallelStrategy",
}
"""What each class runs."""


def names_strategy(value: Any) -> bool:
    """Whether a word or a class is the name of a strategy, of Lightning 1 or 2."""
    return str(value).lower() in (NAMES.keys() | _NEVER.keys()) - {"auto"} or short(value) in {
        *CLASSES,
        *_RENAMED_CLASSES,
    }


def run_by(instance: Built | None, value: Any) -> tuple[str, bool, Mapping[str, Any]]:
    """What a strategy's name or class runs, whether it is Fabric's, and the arguments that its name stands for.

    Raises:
        Unreadable: unishard has none like it, or it is no strategy at all.
    """
    if value is None:
        return "DDPStrategy", False, {}
    if instance is None:
        raise Unreadable(
            f"must be a strategy's name or class, got {shown(value)}; write fsdp, or class_path and init_args", value
        )
    class_ = short(instance.path)
    if class_ in CLASSES:
        return CLASSES[class_], ".fabric." in instance.path or "_fabric" in instance.path, {}
    name = instance.path.lower()
    if name in NAMES and not instance.key:
        runs, stands_for = NAMES[name]
        return runs, name == "deepspeed_stage_1_offload", stands_for
    if name in _NEVER:
        raise Unreadable(f"must be a strategy that is supported: {_NEVER[name]}")
    if class_ in _RENAMED_CLASSES:
        raise Unreadable(
            f"must be a strategy that is supported: Lightning 2 has renamed it; write {_RENAMED_CLASSES[class_]}"
        )
    raise Unreadable(
        f"must be a strategy of Lightning 2.6.6, got {shown(instance.path)}; {_hint(class_)}", instance.path
    )


def _hint(class_: str) -> str:
    near = get_close_matches(class_, [*NAMES, *CLASSES], 1, 0.75)
    return (
        f"did you mean {near[0]!r}?"
        if near
        else f"write one of {', '.join(('ddp', 'fsdp', 'deepspeed_stage_2', *CLASSES))}"
    )
