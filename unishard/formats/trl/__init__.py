"""YAML of TRL's command line: SFTConfig, DPOConfig, GRPOConfig and the like, which are TrainingArguments, and
ModelConfig beside them.
"""

from __future__ import annotations

from unishard.formats.format import Deferred
from unishard.formats.hf import FORMAT as ARGUMENTS
from unishard.formats.markers import Markers, beside, weighted

__all__ = ["FORMAT"]

_MARKERS = weighted(
    {
        4: (
            "assistant_only_loss completion_only_loss dataset_mixture dataset_mixer packing_strategy use_peft "
            "reward_funcs num_generations max_completion_length max_prompt_length precompute_ref_log_probs "
            "desirable_weight dataset_text_field center_rewards_coefficient chat_template_path model_init_kwargs"
        ),
        2: (
            "packing padding_free eval_packing max_length activation_offloading truncation_mode loss_type "
            "dataset_num_proc dataset_kwargs shuffle_dataset f_divergence_type sync_ref_model undesirable_weight "
            "disable_dropout scale_rewards"
        ),
        1: "dataset_train_split dataset_config attn_implementation model_name_or_path dataset_name beta",
    }
)
_ENOUGH = 4
"""Other tools of Trainer have some of these keys as well."""

FORMAT = Deferred("trl", Markers(_MARKERS, beside(ARGUMENTS.markers, _MARKERS, _ENOUGH)))
