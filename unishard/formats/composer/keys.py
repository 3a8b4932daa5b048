"""The keys of a training YAML of llm-foundry 0.22 and of MosaicML's run files, and of Composer's older ones.

llm-foundry refuses a key that it does not know, unless it stands below `variables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import Given, Key, Meaning, Undecided
from unishard.contract.key_rows import boolean, drops, integer, refuses
from unishard.contract.rules import Fit
from unishard.formats.composer.batches import BATCHES
from unishard.formats.composer.fsdp_keys import FSDP
from unishard.formats.composer.logs import LOGGED
from unishard.formats.composer.optimization_keys import OPTIMIZATION
from unishard.formats.composer.saving import SAVED
from unishard.formats.names import ignored

__all__ = ["KEYS", "RUN", "deferred"]

_REASONS: Mapping[str, str] = {
    "concerns the model, which the training script builds": "model tokenizer tokenizer_name model_name_or_path "
    "max_seq_len code_paths "
    "model_dtype autocast_dtype autocast_precision use_cache max_split_size_mb expandable_segments cuda_load_lazy",
    "concerns the data, which the training script loads": "train_loader eval_loader eval_loaders train_dataset "
    "eval_dataset val_dataset "
    "dataset dataloader data_local data_remote device_eval_batch_size device_eval_microbatch_size "
    "global_eval_batch_size eval_batch_size "
    "spin_dataloaders icl_seq_len icl_max_seq_len num_class_images use_prior_preservation prior_loss_weight",
    "affects only evaluation": "eval_first eval_interval eval_subset_num_batches icl_subset_num_batches icl_tasks "
    "icl_tasks_str "
    "eval_gauntlet eval_gauntlet_str model_gauntlet models validate_every_n_batches validate_every_n_epochs",
    "affects only logs": "callbacks python_log_level log_config metadata flatten_metadata",
    "affects only the files of checkpoints": "save_filename save_latest_filename save_overwrite "
    "save_weights_only save_ignore_keys load_path load_weights_only load_strict_model_weights "
    "load_ignore_keys load_exclude_algorithms autoresume only_hf_checkpoint only_composer_checkpoint",
    "launcher setting": "dist_timeout device n_gpus",
    "tells the script what to run": "is_train parallel tasks",
    "holds values that other keys refer to": "variables global_seed",
    "belongs to the inference benchmark, which trains nothing": "batch_sizes input_lengths output_lengths num_batches "
    "num_warmup_batches "
    "num_runs benchmark_name use_deepspeed use_fsdp",
}
_DEGREE = "tensor_parallel_degree"


def _seed(value: Any, given: Given) -> Meaning:
    return Meaning(fields={"training.seed": integer(0, 2**32 - 1)(value)})


_WHOLE = "layers that are split between ranks are not supported; remove it and use only fsdp_config"


def _tensor_parallel(value: Any, given: Given) -> Meaning:
    degree = value.get(_DEGREE, 1) if isinstance(value, Mapping) else value
    if degree in (None, 1, {}):
        return Meaning(Fit.IGNORED, "is off")
    return Meaning(Fit.UNSUPPORTED, _WHOLE)


def _compiled(value: Any, given: Given) -> Meaning:
    if value is None or value is False:
        return Meaning(fields={"compile.mode": "none"})
    settings = value if isinstance(value, Mapping) else {}
    fields: dict[str, Any] = {"compile.mode": "full"}
    if settings.get("backend"):
        fields["compile.backend"] = str(settings["backend"])
    rest = sorted(set(settings) - {"backend"})
    note = f"{', '.join(rest)} would be left out: affects only time" if rest else ""
    return Meaning(Fit.EQUIVALENT if rest else Fit.EXACT, note, fields)


def _deterministic(value: Any, given: Given) -> Meaning:
    if boolean(value):
        return Meaning(Fit.NEEDS_INPUT, "call torch.use_deterministic_algorithms(True) in the training script")
    return Meaning(Fit.IGNORED, "is off")


_RECIPE = "the script merges another section into the file; write that section's keys here"

KEYS: Mapping[str, Key] = {
    **BATCHES,
    **FSDP,
    **OPTIMIZATION,
    **SAVED,
    **LOGGED,
    "seed": Key(_seed, "training.seed"),
    "tp_config": Key(_tensor_parallel, "", Fit.UNSUPPORTED, _WHOLE),
    "parallelism_config.tp": Key(_tensor_parallel, "", Fit.UNSUPPORTED, _WHOLE),
    "default_seed": Key(_seed, "training.seed", note="of Composer's benchmarks"),
    "recipe_name": refuses(_RECIPE, lambda value: not value),
    "use_recipe": refuses(_RECIPE, lambda value: not value),
    "lr_scheduler": refuses(
        "belongs to a script with a schedule of its own; write scheduler with a name", lambda value: not value
    ),
    "compile_config": Key(_compiled, "compile.mode, compile.backend"),
    "deterministic_mode": Key(_deterministic),
    "algorithms": refuses("only Composer has them, but for gradient clipping; remove it", lambda value: not value),
    "scheduler": drops("is empty"),
    "optimizer": drops("is empty"),
    **ignored(_REASONS),
}
"""What each says; the rows of an engine's arguments stand in the engine's table."""

_LAUNCHER = "only concerns MosaicML's platform"
RUN: Mapping[str, Key] = {
    key: drops(_LAUNCHER)
    for key in (
        *("name", "run_name", "image", "integrations", "command", "compute", "cluster"),
        *("gpu_type", "gpu_num", "scheduling", "env_variables", "metadata"),
    )
}
"""The keys around `parameters` in a run file of MosaicML."""


def deferred(key: Key) -> Key:
    """The same row, with its fields undecided where a value names what the file does not hold."""

    def read(value: Any, given: Given) -> Meaning:
        if not (isinstance(value, str) and "${" in value) or not key.fields:
            return key.read(value, given)
        who = Undecided(f"{value}, which the file does not have")
        return Meaning(Fit.NEEDS_INPUT, f"the value comes from {who.who}", dict.fromkeys(key.fields.split(", "), who))

    return Key(read, key.fields, key.fit, key.note, key.silent)
