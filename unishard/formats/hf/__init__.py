"""TrainingArguments of transformers, as YAML, JSON or a mapping."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.hf.sections import ARGUMENTS, SURE
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "per_device_train_batch_size": 5,
    "per_device_eval_batch_size": 3,
    "learning_rate": 1,
    "lr_scheduler_type": 2,
    "num_train_epochs": 2,
    "output_dir": 1,
    "fsdp": 2,
    "fsdp_config": 1,
    "deepspeed": 1,
    **{f"{name}.{SURE}": 9 for name in ARGUMENTS},
    "max_grad_norm": 1,
    "gradient_accumulation_steps": 1,
    "optim": 2,
    "lr_scheduler_kwargs": 2,
    # A file that `fsdp_config` names holds its keys alone.
    "fsdp_transformer_layer_cls_to_wrap": 2,
    "transformer_layer_cls_to_wrap": 2,
    "fsdp_sharding_strategy": 2,
    "fsdp_auto_wrap_policy": 2,
    "auto_wrap_policy": 2,
    "fsdp_state_dict_type": 2,
    "fsdp_offload_params": 1,
    "reshard_after_forward": 2,
    "fsdp_reshard_after_forward": 2,
    "cpu_ram_efficient_loading": 2,
    "xla_fsdp_v2": 2,
    "xla": 2,
}

FORMAT = Deferred("hf", Signs(_SIGNS))
