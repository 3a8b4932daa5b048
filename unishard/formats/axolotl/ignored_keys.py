"""Keys of axolotl about the model, the data and the logs, in groups (axolotl 0.18.0, src/axolotl/utils/schemas and
integrations).
"""

from __future__ import annotations

from collections.abc import Mapping

from unishard.contract.entries import Key
from unishard.contract.key_rows import refuses
from unishard.formats.hf.loop import off
from unishard.formats.names import ignored

__all__ = ["IGNORED"]

_GROUPS: Mapping[str, str] = {
    "names the model and how it is loaded, which the training script does": (
        "base_model base_model_config base_model_ignore_patterns cls_model_config model_config model_kwargs model_type "
        "model_revision "
        "overrides_of_model_config overrides_of_model_kwargs type_of_model revision_of_model model_quantization_config "
        "model_quantization_config_kwargs tokenizer_config tokenizer_use_fast tokenizer_legacy "
        "tokenizer_use_mistral_common "
        "tokenizer_type tokenizer_save_jinja_files processor_type processor_kwargs trust_remote_code "
        "experimental_skip_move_to_device "
        "use_onebitllms resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings "
        "embeddings_skip_upcast reinit_weights "
        "special_tokens tokens added_tokens_overrides is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model "
        "is_qwen_derived_model low_cpu_mem_usage device device_map max_memory gpu_memory_limit fix_untrained_tokens "
        "rope_scaling "
        "image_size image_resize_algorithm role_boundaries mean_resizing scaling_softmax scaling_softmax_factor "
        "scaling_softmax_bias"
    ),
    "concerns the data, which the training script loads": (
        "datasets test_datasets pretraining_dataset dataset_prepared_path dataset_shard_num dataset_shard_idx "
        "skip_prepare_dataset "
        "num_dataset_shards_to_save dataset_processes dataset_num_proc dataset_exact_deduplication "
        "dataset_keep_in_memory "
        "shuffle_merged_datasets shuffle_before_merging_datasets push_dataset_to_hub hf_use_auth_token "
        "remove_unused_columns "
        "dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last sequence_len "
        "excess_length_strategy eval_sequence_len min_sample_len max_prompt_len sample_packing "
        "sample_packing_group_size "
        "sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method sample_packing_eff_est "
        "eval_sample_packing "
        "pad_to_sequence_len pad_to_multiple_of curriculum_sampling multipack_real_batches batch_flattening "
        "group_by_length "
        "train_on_inputs use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks "
        "pretrain_multipack_buffer_size "
        "pretrain_multipack_attn pretraining_sample_concatenation streaming streaming_multipack_buffer_size "
        "chat_template "
        "chat_template_jinja chat_template_kwargs eot_tokens default_system_message total_num_tokens "
        "total_supervised_tokens "
        "is_preprocess preprocess_iterable val_set_size max_packed_sequence_len"
    ),
    "chooses which parameters train, such as LoRA: the training script does that": (
        "adapter load_in_8bit load_in_4bit gptq bnb_config_kwargs lora_model_dir lora_r lora_alpha lora_fan_in_fan_out "
        "lora_target_modules lora_target_parameters lora_target_linear lora_modules_to_save lora_rank_pattern "
        "lora_alpha_pattern "
        "lora_dropout lora_on_cpu peft peft_layers_to_transform peft_layers_pattern peft_use_dora peft_use_rslora "
        "peft_layer_replication "
        "peft_init_lora_weights peft_trainable_token_indices peft_ensure_weight_tying peft_autocast_adapter_dtype "
        "qlora_sharded_model_loading merge_lora merge_method unfrozen_parameters freeze_mm_modules "
        "quantize_moe_experts "
        "lisa_n_layers lisa_step_interval lisa_layers_attribute spectrum_top_fraction spectrum_model_name use_mora "
        "mora_type mora "
        "qat quantization llmcompressor"
    ),
    "chooses kernels of the model's forward, which the training script sets up": (
        "attn_implementation xformers_attention sdp_attention flex_attention flex_attn_compile_kwargs flash_attention "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum sage_attention eager_attention "
        "s2_attention "
        "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen fused_attn_kernel "
        "experts_implementation "
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel chunked_cross_entropy "
        "chunked_cross_entropy_num_chunks "
        "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp llama4_linearized_experts use_kernels "
        "cut_cross_entropy dense_mixer "
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation "
        "liger_cross_entropy "
        "liger_fused_linear_cross_entropy liger_use_token_scaling expert_backend nonexpert_quantization "
        "moe_grouped_backend "
        "moe_dequant_chunk_size moe_bnb_fast use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels "
        "dsv4_fp8_nonexpert_mode "
        "dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode gemma4_fp8_nonexpert "
        "gemma4_nf4_nonexpert "
        "nvfp4_merge_aware nvfp4_merge_aware_start_step unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv "
        "unsloth_lora_o "
        "unsloth_rms_norm unsloth_rope plugins"
    ),
    "names the loss or the method, which the training script computes": (
        "rl trl vllm ebft reward_model process_reward_model center_rewards_coefficient num_labels dpo_use_weighting "
        "dpo_label_smoothing "
        "precompute_ref_log_probs dpo_use_liger_kernel dpo_padding_free dpo_loss_type dpo_loss_weights orpo_alpha "
        "simpo_gamma cpo_alpha "
        "kto_desirable_weight kto_undesirable_weight rl_beta dpo_beta rpo_alpha dpo_use_logits_to_keep "
        "dpo_generate_during_eval "
        "dpo_norm_loss use_eaft eaft_alpha eaft_k kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta "
        "kd_normalize_topk "
        "kd_online_server_base_url kd_online_topk kd_online_server kd_online_timeout kd_temperature_min diffusion "
        "trainer_cls hatchery"
    ),
    "affects only logs": (
        "wandb_run_id wandb_watch wandb_log_model hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace "
        "comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio "
        "trackio_project_name "
        "trackio_run_name trackio_space_id use_swanlab swanlab_project swanlab_experiment_name swanlab_description "
        "swanlab_mode "
        "swanlab_workspace swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host "
        "swanlab_lark_webhook_url "
        "swanlab_lark_secret swanlab_log_completions swanlab_completion_log_interval swanlab_completion_max_buffer "
        "use_otel_metrics "
        "otel_metrics_host otel_metrics_port include_tokens_per_second include_tkps "
        "debug gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature"
    ),
    "affects only evaluation": (
        "eval_steps evals_per_epoch eval_strategy evaluation_strategy eval_batch_size eval_table_size "
        "eval_max_new_tokens "
        "eval_table_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split "
        "generate_samples "
        "num_generation_samples generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model"
    ),
    "affects only checkpoints": (
        "save_first_step save_only_model save_safetensors load_best_model_at_end metric_for_best_model "
        "greater_is_better "
        "resume_from_checkpoint auto_resume_from_checkpoints dynamic_checkpoint hub_model_id hub_strategy hub_revision "
        "early_stopping_patience fsdp_final_state_dict_type"
    ),
    "stops the training, which the training script does": "loss_watchdog_threshold loss_watchdog_patience",
    "launcher setting": (
        "world_size local_rank ddp ddp_timeout ray_run_name resources_per_worker axolotl_config_path capabilities "
        "env_capabilities"
    ),
    "affects only DistributedDataParallel's collectives: losses are the same": "ddp_bucket_cap_mb "
    "ddp_find_unused_parameters",
    "affects only memory": "gc_steps torch_empty_cache_steps gc_collect_steps activation_offloading layer_offloading",
    "affects only time and memory: losses are the same": "selective_checkpointing deepcompile torch_compile_options",
    "is about axolotl's command line": "strict",
    "belongs to context parallelism, which is off": "heads_k_stride ring_attn_func",
    "belongs to expert parallelism, which is off": (
        "expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes "
        "expert_parallel_token_capacity "
        "expert_parallel_fallback_on_unsupported"
    ),
    "belongs to an optimizer or a schedule that is not used here": (
        "torchdistx_path adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of "
        "qgalore_rank "
        "qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits "
        "qgalore_proj_group_size "
        "qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size lr_div_factor jagged_restart_warmup_steps "
        "jagged_restart_anneal_steps relora_prune_ratio relora_prune_method relora_cpu_offload relora_warmup_steps "
        "relora_anneal_steps "
        "grokfast_alpha grokfast_lamb eta_min"
    ),
    "names what fp8 switches on": "fp8_enable_fsdp_float8_all_gather",
}

_GROUPED = "gives some parameters another rate; make parameter groups of it"
_RESTARTS = "restarts the schedule during training; build the scheduler in the training script"
_PARALLEL = "parallelism within a model is not supported; write 1 and use more ranks"


def _is_one(value: object) -> bool:
    return off(value) or value == 1


IGNORED: Mapping[str, Key] = {
    **ignored(_GROUPS),
    "embedding_lr": refuses(_GROUPED, off),
    "embedding_lr_scale": refuses(_GROUPED, off),
    "lr_groups": refuses(_GROUPED, off),
    "loraplus_lr_ratio": refuses(_GROUPED, off),
    "loraplus_lr_embedding": refuses(_GROUPED, off),
    "jagged_restart_steps": refuses(_RESTARTS, off),
    "relora": refuses(_RESTARTS, off),
    "relora_steps": refuses(_RESTARTS, off),
    "lr_quadratic_warmup": refuses("a quadratic warmup is not supported; build the scheduler in the script", off),
    "fp8": refuses("fp8 is not supported; write bf16", off),
    "tensor_parallel_size": refuses(_PARALLEL, _is_one),
    "context_parallel_size": refuses(_PARALLEL, _is_one),
    "sequence_parallel_degree": refuses(_PARALLEL, _is_one),
    "expert_parallel_size": refuses(_PARALLEL, _is_one),
}
"""Keys that a config of the training does not need, and some that it cannot say."""
