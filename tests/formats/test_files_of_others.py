"""Files as people have them: of older releases, with a script's own keys beside the tool's, and of trial runs."""

from __future__ import annotations

from typing import Any

import pytest
from accounting import faults_of

from unishard.config.topology import Topology
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import Outcome, read, translate
from unishard.formats.catalog import recognise
from unishard.formats.source import open_source

EIGHT = Topology(world_size=8, local_world_size=8)


def translated(document: dict[str, Any], name: str, to: str = "unishard") -> Outcome:
    outcome = translate(document, to, from_=name, topology=EIGHT)
    assert not faults_of(outcome)
    return outcome


def item(document: dict[str, Any], name: str, key: str) -> Any:
    return next(item for item in translated(document, name).items if item.key == key and not item.assumed)


# torchtitan

OF_2024 = {
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {
        "batch_size": 2,
        "warmup_steps": 0,
        "steps": 50,
        "data_parallel_shard_degree": 4,
        "data_parallel_replicate_degree": 2,
    },
    "experimental": {"pipeline_parallel_degree": 1, "enable_async_tensor_parallel": False},
    "float8": {"enable_float8_linear": False},
}


@pytest.mark.parametrize(
    ("table", "key", "value", "refused"),
    [
        ("training", "tensor_parallel_degree", 8, True),
        ("experimental", "pipeline_parallel_degree", 4, True),
        ("experimental", "context_parallel_degree", 2, True),
        ("float8", "enable_float8_linear", True, True),
        ("training", "fp8_linear", "dynamic", True),
        ("training", "data_parallel_type", "ddp", True),
        ("training", "data_parallel_type", "fsdp", False),
        ("training", "fp8_linear", "", False),
    ],
)
def test_what_torchtitan_of_2024_had_elsewhere_is_no_less_refused(
    table: str, key: str, value: Any, refused: bool
) -> None:
    document = {**OF_2024, table: {**OF_2024[table], key: value}}
    assert (item(document, "torchtitan", f"{table}.{key}").fit is Fit.UNSUPPORTED) == refused


def test_degrees_and_warm_up_of_torchtitan_in_2024() -> None:
    cfg = read(OF_2024, "torchtitan", topology=EIGHT).config
    assert (cfg.sharding.strategy, cfg.sharding.group_size, cfg.scheduler.warmup_steps) == ("hybrid_shard", 4, 0)
    assert not translated(OF_2024, "torchtitan").of(Fit.UNSUPPORTED)


@pytest.mark.parametrize("table", ["metrics", "profiling"])
@pytest.mark.parametrize("key", ["save_aim_folder", "enable_aim"])
def test_a_forks_keys_about_logs_do_not_train(table: str, key: str) -> None:
    assert item({**OF_2024, table: {key: "x"}}, "torchtitan", f"{table}.{key}").fit is Fit.IGNORED


def test_a_forks_evaluation_does_not_train() -> None:
    assert not translated({**OF_2024, "evaluation": {"enable_evaluation": True}}, "torchtitan").of(Fit.UNSUPPORTED)


def test_a_key_at_both_places_is_refused_at_the_older_one() -> None:
    document = {**OF_2024, "lr_scheduler": {"warmup_steps": 3}}
    assert item(document, "torchtitan", "training.warmup_steps").fit is Fit.UNSUPPORTED


def test_updates_in_backward_clip_nothing() -> None:
    document = {"training": {"max_norm": 1.0, "steps": 10}, "optimizer": {"early_step_in_backward": True}}
    assert read(document, "torchtitan", topology=EIGHT).config.training.gradient_clipping is None
    assert "early_step_in_backward" in item(document, "torchtitan", "training.max_norm").note


def test_a_models_own_table_is_its_own_and_a_misspelt_one_is_not() -> None:
    assert item({**OF_2024, "encoder": {"t5": "x"}}, "torchtitan", "encoder").fit is Fit.IGNORED
    assert item({**OF_2024, "paralelism": {"x": 1}}, "torchtitan", "paralelism.x").fit is Fit.UNSUPPORTED


# Lightning


@pytest.mark.parametrize("place", ["accelerator", "distributed_backend"])
def test_lightning_1_named_the_strategy_elsewhere(place: str) -> None:
    document = {
        "trainer": {place: "ddp", "gpus": 4, "max_epochs": 3, "resume_from_checkpoint": None, "terminate_on_nan": True}
    }
    assert not translated(document, "lightning").of(Fit.UNSUPPORTED)
    reading = read(document, "lightning")
    assert (reading.config.sharding.strategy, reading.config.training.nonfinite) == ("no_shard", "raise")
    assert reading.topology == Topology(world_size=4, local_world_size=4)


def test_what_lightning_1_knew_and_no_engine_has() -> None:
    document = {"trainer": {"accelerator": "ddp_sharded", "amp_backend": "apex"}}
    assert item(document, "lightning", "trainer.amp_backend").fit is Fit.UNSUPPORTED
    assert "FairScale" in item(document, "lightning", "trainer.accelerator").note


@pytest.mark.parametrize(
    "document",
    [
        {
            "trainer": {"devices": 2, "accelerator": "gpu", "strategy": "ddp"},
            "hydra": {"run": {"dir": "."}},
            "model": {"optim": {}},
        },
        {"trainer": {"devices": 2, "accelerator": "gpu"}, "defaults": ["_self_", {"override hydra/launcher": "x"}]},
        {"_target_": "lightning.pytorch.trainer.Trainer", "devices": 2, "strategy": "ddp"},
        {"model": {"base_learning_rate": 1e-4}, "lightning": {"trainer": {"accumulate_grad_batches": 2}}},
    ],
)
def test_a_trainer_of_lightning_that_hydra_makes_is_read(document: dict[str, Any]) -> None:
    assert recognise(open_source(document)).name == "lightning"
    outcome = translated(document, "lightning")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert not [item for item in outcome.items if "which is not read" in item.note]


@pytest.mark.parametrize(
    "document",
    [
        {"defaults": ["default"], "strategy": "ddp"},
        {"_target_": "x.Net", "lr": 1},
        {"dist_config": {}},
        {"train": {"max_tokens": 1}, "out_dir": "o"},
    ],
)
def test_what_the_file_alone_does_not_hold_is_not_read(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="which unishard does not read"):
        recognise(open_source(document))


# Scripts around TrainingArguments

ARGUMENTS = {"per_device_train_batch_size": 2, "learning_rate": 1e-5, "output_dir": "o"}


@pytest.mark.parametrize(
    "others",
    [
        {"dataset_mixture": {"datasets": []}, "hub_model_revision": "v1"},
        {"beta": 0.1, "max_prompt_length": 512, "precompute_ref_log_probs": True},
        {"reward_funcs": ["a"], "num_generations": 8, "vllm_mode": "colocate"},
        {"train_file": "a.json", "max_source_length": 3, "eval_generation_config": {}},
    ],
)
def test_arguments_of_the_other_dataclasses_are_the_scripts(others: dict[str, Any]) -> None:
    assert not translated({**ARGUMENTS, **others}, "hf").of(Fit.UNSUPPORTED)


@pytest.mark.parametrize(
    "wrong", ["learning_rates", "per_device_batch_size", "gradient_acumulation_steps", "lr_schedule_type"]
)
def test_a_misspelt_argument_among_them_is_refused(wrong: str) -> None:
    found = item({**ARGUMENTS, "dataset_name": "d", "beta": 0.1, wrong: 1}, "hf", wrong)
    assert found.fit is Fit.UNSUPPORTED
    assert "did you mean" in found.note


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("use_muon", True, True),
        ("use_apollo", True, True),
        ("use_adam_mini", False, False),
        ("tensor_model_parallel_size", 4, True),
        ("pipeline_model_parallel_size", 1, False),
        ("sequence_parallel_size", 2, True),
        ("use_eaft_loss", True, False),
    ],
)
def test_what_a_script_trains_otherwise_is_refused(key: str, value: Any, refused: bool) -> None:
    found = item({**ARGUMENTS, "stage": "sft", "finetuning_type": "full", key: value}, "hf", key)
    assert (found.fit is Fit.UNSUPPORTED) == refused


@pytest.mark.parametrize(("steps", "name"), [(10, "constant"), (11, "cosine")])
def test_a_warm_up_as_long_as_the_run_of_trainer_never_falls(steps: int, name: str) -> None:
    document = {**ARGUMENTS, "lr_scheduler_type": "cosine", "warmup_steps": 10, "max_steps": steps}
    assert not translated(document, "hf").of(Fit.UNSUPPORTED)
    scheduler = read(document, "hf").config.scheduler
    assert (scheduler.name, scheduler.warmup_steps) == (name, 10)


# Composer

TRAINING = {
    "max_duration": "10ba",
    "global_train_batch_size": 8,
    "device_train_microbatch_size": 1,
    "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    "scheduler": {"name": "cosine_with_warmup", "t_warmup": "2ba", "alpha_f": 0.1},
}


def test_keys_of_another_script_of_composers_are_the_scripts() -> None:
    document = {
        **TRAINING,
        "is_train": True,
        "eval_dataset": {"path": "x"},
        "tasks": {"mnli": {"max_duration": "2ba"}},
        "use_ema": False,
    }
    assert not translated(document, "composer").of(Fit.UNSUPPORTED)


@pytest.mark.parametrize(
    ("key", "value"),
    [("recipe_name", "hot"), ("use_recipe", True), ("lr_scheduler", {"gamma": 0.1}), ("max_durations", "1ep")],
)
def test_keys_that_change_the_training_are_refused(key: str, value: Any) -> None:
    refused = translated({**TRAINING, key: value}, "composer").of(Fit.UNSUPPORTED)
    assert [item.key.partition(".")[0] for item in refused] == [key]


def test_a_part_of_a_duration_that_is_not_there_needs_a_decision() -> None:
    document = {key: value for key, value in TRAINING.items() if key != "max_duration"}
    document["scheduler"] = {"name": "linear_decay_with_warmup", "t_warmup": "0.5dur", "alpha_f": 0.0}
    found = item(document, "composer", "scheduler.t_warmup")
    assert found.fit is Fit.NEEDS_INPUT
    assert "max_duration" in found.note


# axolotl


@pytest.mark.parametrize(
    "key", ["weight_decay", "micro_batch_size", "seed", "adam_beta2", "max_steps", "learning_rate"]
)
def test_null_in_axolotl_is_not_set(key: str) -> None:
    document = {"base_model": "m", "datasets": [{"path": "d"}], "sequence_len": 8, "learning_rate": 1e-4, key: None}
    assert not translated(document, "axolotl").of(Fit.UNSUPPORTED)


def test_arguments_in_a_section_of_a_scripts_own_file() -> None:
    document = {
        "model": {"name": "m"},
        "training": {**ARGUMENTS, "bf16": True, "early_stopping": 3},
        "data": {"path": "d"},
    }
    assert recognise(open_source(document)).name == "hf"
    assert not translated(document, "hf").of(Fit.UNSUPPORTED)
    cfg = read(document, "hf").config
    assert (cfg.training.micro_batch_size, cfg.optimizer.lr, cfg.precision.compute) == (2, 1e-5, "bf16")
    again = translated(document, "hf", "hf").document
    assert again.items() >= {"learning_rate": 1e-5, "bf16": True, "per_device_train_batch_size": 2}.items()


@pytest.mark.parametrize(
    ("beside", "stage"),
    [
        ({"deepspeed": {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}}, "shard_grad_op"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}, "accelerate": {}}, "full_shard"),
        ({"deepspeed": {"enabled": True, "file": "ds.json"}}, "no_shard"),
    ],
)
def test_deepspeeds_config_beside_that_section_is_read(beside: dict[str, Any], stage: str) -> None:
    document = {"model": {"name": "m"}, "training": {**ARGUMENTS, "bf16": True}, **beside}
    assert read(document, "hf").config.sharding.strategy == stage
    assert not translated(document, "hf").of(Fit.UNSUPPORTED)


def test_a_warm_up_that_a_variable_holds_leaves_the_shape_known() -> None:
    document = {**ARGUMENTS, "lr_scheduler_type": "cosine", "warmup_steps": "${WARMUP}", "max_steps": 100}
    reading = read(document, "hf")
    assert (reading.config.scheduler.name, reading.config.scheduler.total_steps) == ("cosine", 100)
    assert [field for field in reading.undecided if field.startswith("scheduler.")] == ["scheduler.warmup_steps"]


def test_modules_for_galore_matter_with_it_alone() -> None:
    document = {**ARGUMENTS, "optim_target_modules": ["q"]}
    assert item(document, "hf", "optim_target_modules").fit is Fit.IGNORED
    assert item({**document, "optim": "galore_adamw"}, "hf", "optim_target_modules").fit is Fit.UNSUPPORTED
