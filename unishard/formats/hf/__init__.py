"""TrainingArguments of transformers, as YAML, JSON or a mapping."""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.hf.dialects import section_in
from unishard.formats.markers import Markers, weighted

__all__ = ["FORMAT"]

# A file that `fsdp_config` names holds only its keys.
_MARKERS = weighted(
    {
        5: "per_device_train_batch_size",
        3: "per_device_eval_batch_size",
        2: (
            "lr_scheduler_type num_train_epochs fsdp optim lr_scheduler_kwargs fsdp_transformer_layer_cls_to_wrap "
            "transformer_layer_cls_to_wrap fsdp_sharding_strategy fsdp_auto_wrap_policy auto_wrap_policy "
            "fsdp_state_dict_type reshard_after_forward fsdp_reshard_after_forward cpu_ram_efficient_loading "
            "xla_fsdp_v2 xla"
        ),
        1: "learning_rate output_dir fsdp_config deepspeed max_grad_norm gradient_accumulation_steps "
        "fsdp_offload_params",
    }
)
_SECTION = 9

FORMAT = Deferred("hf", Markers(_MARKERS, lambda data: _SECTION * (section_in(data) is not None)))
