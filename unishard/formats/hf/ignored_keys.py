"""TrainingArguments that a config of the training does not need, in groups (transformers 5.23, training_args.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import Given, Key, Meaning, Unreadable
from unishard.contract.key_rows import refuses
from unishard.contract.rules import Fit
from unishard.formats.hf.loop import off
from unishard.formats.names import ignored

__all__ = ["IGNORED"]

_GROUPS: Mapping[str, str] = {
    "affects only logs": (
        "logging_dir logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica disable_tqdm project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug"
    ),
    "affects only evaluation": (
        "eval_strategy evaluation_strategy evaluate_during_training eval_steps eval_delay per_device_eval_batch_size "
        "per_gpu_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics bf16_full_eval "
        "fp16_full_eval "
        "predict_with_generate generation_max_length generation_num_beams generation_config sortish_sampler "
        "jit_mode_eval"
    ),
    "affects only checkpoints": (
        "overwrite_output_dir save_only_model save_safetensors save_on_each_node load_best_model_at_end "
        "metric_for_best_model "
        "greater_is_better ignore_data_skip "
        "restore_callback_states_from_checkpoint resume_from_checkpoint"
    ),
    "affects only the Hub": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token"
    ),
    "concerns the DataLoader, which the training script builds": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names "
        "train_sampling_strategy "
        "group_by_length length_column_name split_batches dispatch_batches"
    ),
    "launcher setting": (
        "local_rank ddp_backend ddp_timeout use_cpu no_cuda use_mps_device tpu_num_cores tpu_metrics_debug xpu_backend "
        "ray_scope"
    ),
    "affects only DistributedDataParallel's collectives: losses are the same": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_static_graph"
    ),
    "tells the script what to run": "do_train do_eval do_predict",
    "chooses kernels of the model's forward, which the training script sets up": "use_liger_kernel liger_kernel_config "
    "use_cache",
    "affects only memory": "torch_empty_cache_steps",
    "names what another key switches on": "past_index mp_parameters fp16_backend half_precision_backend fp16_opt_level "
    "use_ipex",
}

_NOISE = "adds noise to the embeddings; add it in the training script with a forward hook"
_SMOOTHING = "changes the loss, which the training script computes; smooth the labels there"

_FILES = "affects only checkpoints"
_DATA = "concerns the DataLoader, which the training script builds"


def _prefetched(value: Any, given: Given) -> Meaning:
    if value is not None and not given.get("dataloader_num_workers"):
        raise Unreadable(f"must be null without dataloader_num_workers, got {shown(value)}; remove it")
    return Meaning(Fit.IGNORED, _DATA, kept=True)


def _best(value: Any, given: Given) -> Meaning:
    evaluated, saved = (
        given.get("eval_strategy") or given.get("evaluation_strategy") or "no",
        given.get("save_strategy") or "steps",
    )
    if value and saved not in ("best", evaluated):
        strategies = f"eval_strategy ({evaluated}) and save_strategy ({saved})"
        raise Unreadable(f"must be false where {strategies} differ, got {shown(value)}; make the two equal")
    return Meaning(Fit.IGNORED, _FILES, kept=True)


IGNORED: Mapping[str, Key] = {
    **ignored(_GROUPS),
    "load_best_model_at_end": Key(_best, "", Fit.IGNORED, _FILES),
    "dataloader_prefetch_factor": Key(_prefetched, "", Fit.IGNORED, _DATA),
    "label_smoothing_factor": refuses(_SMOOTHING, off),
    "neftune_noise_alpha": refuses(_NOISE, off),
    "sharded_ddp": refuses("transformers removed fairscale's sharded DDP; write fsdp: true", off),
    "torchdynamo": refuses("transformers calls it torch_compile_backend now; write that", off),
    "tp_size": refuses("tensor parallelism is not supported; remove it", lambda value: off(value) or value == 1),
}
