"""Config files of llm-foundry, which hands them to Composer's Trainer, and MosaicML's run files around them."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.signs import Signs, weighted

__all__ = ["FORMAT"]

_SIGNS = weighted(
    {
        9: "parameters.max_duration parameters.train_loader parameters.fsdp_config",
        5: "device_train_microbatch_size device_train_grad_accum global_train_batch_size",
        4: "device_eval_batch_size max_duration train_loader",
        3: "scheduler.t_warmup",
        2: "max_seq_len train_dataset schedulers parameters integrations callbacks algorithms loggers "
        "scheduler.alpha_f",
        1: "fsdp_config run_name parallelism_config",
    }
)

FORMAT = Deferred("composer", Signs(_SIGNS), read_only=True)
