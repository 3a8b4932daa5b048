"""Config files of llm-foundry, which hands them to Composer's Trainer, and MosaicML's run files around them."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs

__all__ = ["FORMAT"]

_SIGNS = {
    "max_seq_len": 2,
    "device_train_microbatch_size": 5,
    "device_train_grad_accum": 5,
    "global_train_batch_size": 5,
    "device_eval_batch_size": 4,
    "max_duration": 4,
    "train_loader": 4,
    "train_dataset": 2,
    "schedulers": 2,
    "fsdp_config": 1,
    "run_name": 1,
    "parallelism_config": 1,
    "parameters": 2,
    "integrations": 2,
    "callbacks": 2,
    "algorithms": 2,
    "loggers": 2,
    "scheduler.t_warmup": 3,
    "scheduler.alpha_f": 2,
    "parameters.max_duration": 9,
    "parameters.train_loader": 9,
    "parameters.fsdp_config": 9,
}

FORMAT = Deferred("composer", Signs(_SIGNS))
