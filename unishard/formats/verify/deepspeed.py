"""What DeepSpeed makes of its JSON: DeepSpeedConfig."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from unishard.config.nested import Native, flat, nested
from unishard.config.sharding import ZERO_STAGES
from unishard.formats.verify.settings import AUTO, KEPT, clipping

_SHARDS_PARAMS = 3
_ALL = 10**15
"""Parameters that no model has: as many may stay."""
_MICRO, _WINDOW, _BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_SCHEDULES = {
    None: "constant",
    "WarmupLR": "constant",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
    "LinearLR": "linear",
    "CosineAnnealingLR": "cosine",
}
_NAMES = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adagrad": "adagrad", "lion": "lion"}


def settings_of(document: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The settings with which DeepSpeed would train.

    Values that a training script fills in ("auto") are left out for DeepSpeed, and `AUTO` in the result. Raises what
    DeepSpeed raises.
    """
    with redirect_stdout(StringIO()):
        from deepspeed.runtime.config import DeepSpeedConfig

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        open_ = {key for key, value in flat(document) if value == AUTO}
        config = DeepSpeedConfig(_completed(document, open_, ranks))
    zero = config.zero_config
    settings: dict[str, Any] = {
        "sharding.strategy": _strategy(zero),
        "precision.compute": "bf16"
        if config.bfloat16_config.enabled
        else "fp16"
        if config.float16_config.enabled
        else "fp32",
        "offload.params": _device(zero.offload_param if zero.stage == _SHARDS_PARAMS else None),
        "offload.optimizer": _device(zero.offload_optimizer),
        "training.micro_batch_size": config.train_micro_batch_size_per_gpu,
        "training.gradient_accumulation_steps": config.gradient_accumulation_steps,
        "training.gradient_clipping": clipping(config.gradient_clipping),
        **_optimizer(config, top_is_open=_TOP in open_),
    }
    if settings["precision.compute"] == "fp16":
        settings["precision.loss_scale"] = config.float16_config.loss_scale or "dynamic"
    if _MICRO not in document:
        del settings["training.micro_batch_size"]  # it follows from the ranks, or the script says it
    if _WINDOW not in document and (_BATCH in document or _MICRO not in document):
        del settings["training.gradient_accumulation_steps"]
    if config.bfloat16_config.enabled or config.float16_config.enabled:
        open_ -= {"bf16.enabled", "fp16.enabled"}  # one of them is decided
    return settings | {field: AUTO for key in open_ for field in _DECIDES.get(key, ())}


_TOP = "scheduler.params.warmup_max_lr"
"""The rate, which transformers fills in as the optimizer's."""
_DECIDES: Mapping[str, tuple[str, ...]] = {
    _MICRO: ("training.micro_batch_size",),
    _WINDOW: ("training.gradient_accumulation_steps",),
    "gradient_clipping": ("training.gradient_clipping",),
    "bf16.enabled": ("precision.compute", "precision.loss_scale"),
    "fp16.enabled": ("precision.compute", "precision.loss_scale"),
    "zero_optimization.stage": ("sharding.strategy",),
    "zero_optimization.offload_param.device": ("offload.params",),
    "zero_optimization.offload_optimizer.device": ("offload.optimizer",),
    "optimizer.type": ("optimizer.name",),
    "optimizer.params.lr": ("optimizer.lr",),
    "optimizer.params.weight_decay": ("optimizer.weight_decay",),
    "optimizer.params.betas": ("optimizer.betas",),
    "scheduler.params.warmup_num_steps": ("scheduler.warmup_steps",),
    "scheduler.params.total_num_steps": ("scheduler.total_steps",),
}


def _completed(document: Mapping[str, Any], open_: set[str], ranks: int) -> Native:
    """What DeepSpeed can be given in one process: one micro-batch where nothing says how many, and one rank's share of
    the global batch.
    """
    completed = nested({key: value for key, value in flat(document) if key not in open_})
    if isinstance(completed.get("aio"), dict):
        completed["aio"] = {
            key: value for key, value in completed["aio"].items() if key != "use_gds"
        }  # which needs a GPU
    if not {_MICRO, _BATCH} & completed.keys():
        completed[_MICRO] = 1
    if ranks == 1 and all(isinstance(completed.get(key), int) for key in (_MICRO, _WINDOW, _BATCH)):
        ranks = max(completed[_BATCH] // max(completed[_MICRO] * completed[_WINDOW], 1), 1)  # which the three say
    if isinstance(completed.get(_BATCH), int) and completed[_BATCH] % ranks == 0:
        completed[_BATCH] //= ranks
    return completed


def _strategy(zero: Any) -> str:
    kept = zero.stage == _SHARDS_PARAMS and min(zero.max_live_parameters, zero.max_reuse_distance) >= _ALL
    return KEPT if kept else ZERO_STAGES[zero.stage]


def _device(block: Any) -> str:
    return "none" if block is None else str(getattr(block.device, "value", block.device))


def _optimizer(config: Any, *, top_is_open: bool) -> dict[str, Any]:
    """What DeepSpeed builds itself; nothing where the training script does."""
    settings: dict[str, Any] = {}
    if config.optimizer_name:
        params = config.optimizer_params or {}
        name = _NAMES.get(config.optimizer_name, config.optimizer_name)
        plain = params.get("adam_w_mode") is False and name == "adamw"
        settings["optimizer.name"] = "adam" if plain else name
        torchs = params.get("torch_adam") and not plain and name == "adamw"
        defaults = {"lr": 1e-3, "weight_decay": 0.01 if torchs else 0.0}
        if name == "muon":
            defaults = {"lr": params.get("muon_lr", 0.02), "weight_decay": 0.0}
            params = {key: value for key, value in params.items() if key != "lr" or "muon_lr" not in params}
        settings |= {f"optimizer.{key}": params.get(key, default) for key, default in defaults.items()}
        if "betas" in params:
            settings["optimizer.betas"] = params["betas"]
    if config.scheduler_name in _SCHEDULES and config.scheduler_name:
        params = config.scheduler_params or {}
        settings["scheduler.name"] = _SCHEDULES[config.scheduler_name]
        if config.scheduler_name.startswith("Warmup"):
            settings["scheduler.warmup_steps"] = max(2, params.get("warmup_num_steps", 1000))
            top = params.get("warmup_max_lr", 0.001 if config.scheduler_name != "WarmupCosineLR" else None)
            if (
                top is not None
                and not (top_is_open and "optimizer.lr" in settings)
                and config.scheduler_name != "WarmupCosineLR"
            ):
                settings["optimizer.lr"] = top
        if "total_num_steps" in params:
            settings["scheduler.total_steps"] = params["total_num_steps"]
    return settings
