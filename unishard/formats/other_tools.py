"""Tools whose configs unishard does not read, and the signs by which each is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unishard.formats.signs import Signs, weighted

__all__ = ["TOOLS", "OtherTool", "named"]

_ENOUGH = 4
_ANEW = "run `unishard init`"
_NAMES_A_CLASS = ("_target_", "_component_", "_recipe_", "class_path", "recipe")


class OtherTool(NamedTuple):
    """A tool whose configs unishard does not read."""

    name: str
    signs: Signs
    """The weights of its keys; those of at least 2 are in no format that unishard reads. `-` counts as `_`."""
    modules: tuple[str, ...] = ()
    """Python modules whose classes only its files name."""
    instead: str = _ANEW
    """What to do."""


def _tool(name: str, keys: Mapping[int, str], *modules: str, instead: str = _ANEW) -> OtherTool:
    return OtherTool(name, Signs(weighted(keys)), modules, instead)


def _megatron(name: str, keys: Mapping[int, str]) -> OtherTool:
    """A tool on Megatron's arguments, which scripts around TrainingArguments have beside those."""
    return OtherTool(name, Signs(weighted(keys), lambda data: -100 * ("per_device_train_batch_size" in data)))


_FUSED = (
    "pipeline_model_parallel_size use_distributed_optimizer overlap_grad_reduce overlap_param_gather "
    "cross_entropy_loss_fusion "
    "lr_warmup_fraction no_save_optim no_load_optim recompute_granularity moe_permute_fusion"
)
_MODEL = (
    "num_layers hidden_size num_attention_heads seq_length max_position_embeddings train_iters lr_decay_iters "
    "lr_decay_style"
)

TOOLS = (
    _tool(
        "GPT-NeoX",
        {
            2: (
                "pipe_parallel_size model_parallel_size pos_emb rotary_pct no_weight_tying gpt_j_residual gpt_j_tied "
                "sparsity_config "
                "output_layer_parallelism attention_config keep_last_n_checkpoints train_data_paths "
                "output_layer_init_method "
                "scaled_upper_triang_masked_softmax_fusion use_mup checkpoint_num_layers synchronize_each_layer"
            ),
            1: f"{_MODEL} norm data_impl eval_iters tokenizer_type vocab_file merge_file distributed_backend "
            "log_interval",
        },
        instead="run `unishard init`, or move the keys that GPT-NeoX hands to DeepSpeed to a file of their own",
    ),
    _megatron(
        "Megatron-LM",
        {
            2: (
                f"{_FUSED} model_parallel.tensor_model_parallel_size language_model.num_layers encoder_num_layers "
                "use_mcore_models "
                "num_layers_per_virtual_pipeline_stage transformer_impl"
            ),
            1: f"{_MODEL} tensor_model_parallel_size sequence_parallel micro_batch_size global_batch_size data_path "
            "split",
        },
    ),
    _megatron(
        "ms-swift's Megatron",
        {
            2: _FUSED,
            1: "tuner_type train_type split_dataset_ratio padding_free model dataset micro_batch_size "
            "global_batch_size",
        },
    ),
    _tool(
        "Megatron-Bridge",
        {
            3: "train.train_iters ddp.use_distributed_optimizer ddp.overlap_grad_reduce scheduler.lr_decay_iters",
            2: "model.tensor_model_parallel_size model.pipeline_model_parallel_size train.eval_iters "
            "mixed_precision.params_dtype",
            1: "ddp dist rng logger tokenizer",
        },
        "megatron.bridge.",
    ),
    _tool(
        "NeMo AutoModel",
        {4: "step_scheduler", 2: "dist_env checkpoint.model_save_format packed_sequence", 1: "loss_fn distributed"},
        "nemo_automodel.",
    ),
    _tool(
        "NeMo RL",
        {
            4: "policy.dtensor_cfg policy.megatron_cfg grpo.num_prompts_per_step policy.train_micro_batch_size",
            1: "cluster grpo policy",
        },
        "nemo_rl.",
    ),
    _tool(
        "NeMo",
        {
            4: "exp_manager model.megatron_amp_O2 megatron_amp_O2 gpt_model_file pipeline_model_parallel_split_rank",
            2: "model.tensor_model_parallel_size model.micro_batch_size",
            1: "restore_from_path",
        },
        "nemo.",
        "nemo_run.",
    ),
    _tool(
        "torchtune",
        {
            4: "enable_activation_checkpointing checkpointer.checkpoint_dir",
            2: "enable_activation_offloading metric_logger",
            1: "checkpointer tokenizer loss max_steps_per_epoch log_peak_memory_stats custom_sharded_layers",
        },
        "torchtune.",
    ),
    _tool(
        "verl",
        {
            5: "actor_rollout_ref algorithm.adv_estimator model.partial_pretrain",
            2: "trainer.n_gpus_per_node trainer.nnodes trainer.total_epochs data.train_files "
            "rollout.tensor_model_parallel_size",
            1: "critic reward_model trainer.project_name trainer.experiment_name algorithm",
        },
        "verl.",
    ),
    _tool("EasyR1", {3: "worker.actor worker.rollout", 2: "data.rollout_batch_size"}),
    _tool(
        "nanotron", {4: "data_stages lighteval parallelism.pp_engine", 3: "tokens.micro_batch_size tokens.train_steps"}
    ),
    _tool(
        "LLaMA-Factory 1",
        {4: "dist_config kernel_config"},
        instead="run `unishard init`; the YAML of LLaMA-Factory 0.9 is read",
    ),
    _tool("LitGPT", {4: "train.lr_warmup_steps train.max_tokens train.tie_embeddings"}, "litgpt."),
    _tool(
        "OLMo",
        {4: "fsdp.wrapping_strategy", 2: "tokenizer.truncate_direction speed_monitor model.d_model"},
        "olmo.",
        "olmo_core.",
    ),
    _tool(
        "fairseq",
        {
            3: "optimization.max_update distributed_training.ddp_backend",
            2: "checkpoint.save_interval_updates",
            1: "criterion",
        },
    ),
    _tool("MaxText", {4: "ici_fsdp_parallelism dcn_data_parallelism base_emb_dim"}),
    _tool("Levanter", {4: "trainer.fsdp_axis trainer.tensor_parallel_axes"}, "levanter."),
    _tool(
        "open-instruct",
        {
            4: "with_tracking",
            2: "checkpointing_steps dataset_mixer_list keep_last_n_checkpoints try_auto_save_to_beaker "
            "hf_metadata_dataset",
            1: "use_slow_tokenizer dataset_mix_dir num_warmup_steps max_train_steps dpo_loss_type",
        },
        instead="run `unishard init`; such scripts around Accelerate have a loop and defaults of their own",
    ),
    _tool("Weights & Biases", {9: "_wandb wandb_version"}, instead="translate the file from which the run was started"),
    _tool("trlX", {2: "train.pipeline train.trainer method.gen_kwargs train.checkpoint_interval"}),
)
"""Those named, the first of two that a document speaks for as much."""


def named(data: Mapping[str, Any]) -> tuple[OtherTool, list[str]] | None:
    """The tool that a document speaks for, and the keys by which it is known; None if that is none of them."""
    plain = {str(key).replace("-", "_"): value for key, value in data.items()}
    classes = list(_classes(data))
    weights = [tool.signs.weight(plain) + _ENOUGH * _names(tool, classes) for tool in TOOLS]
    most = max(weights)
    if most < _ENOUGH:
        return None
    tool = TOOLS[weights.index(most)]
    return tool, [*tool.signs.found(plain)[:3], *(name for name in classes if name.startswith(tool.modules))][:3]


def _names(tool: OtherTool, classes: list[str]) -> bool:
    return bool(tool.modules) and any(name.startswith(tool.modules) for name in classes)


def _classes(value: Any) -> Iterator[str]:
    """The classes that a document names."""
    match value:
        case Mapping():
            for key, item in value.items():
                if key in _NAMES_A_CLASS and isinstance(item, str):
                    yield item
                yield from _classes(item)
        case list():
            for item in value:
                yield from _classes(item)
