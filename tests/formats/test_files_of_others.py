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
from unishard.formats.files.source import open_source

EIGHT = Topology(world_size=8, local_world_size=8)


def translated(document: dict[str, Any], name: str, to: str = "unishard") -> Outcome:
    outcome = translate(document, to, from_=name, topology=EIGHT)
    assert not faults_of(outcome)
    return outcome


def item(document: dict[str, Any], name: str, key: str) -> Any:
    return next(item for item in translated(document, name).items if item.key == key and not item.assumed)


# Lightning


@pytest.mark.parametrize(
    "document",
    [
        {"trainer": {"devices": 2, "accelerator": "gpu", "strategy": "ddp"}, "hydra": {"run": {"dir": "."}}},
        {"trainer": {"devices": 2, "accelerator": "gpu"}, "defaults": ["_self_", {"override /trainer": "ddp"}]},
        {"_target_": "lightning.pytorch.trainer.Trainer", "devices": 2, "strategy": "ddp"},
        {"_target_": "lightning.pytorch.strategies.DeepSpeedStrategy", "stage": 2},
    ],
)
def test_a_trainer_of_lightning_that_hydra_makes_is_refused_with_what_to_do(document: dict[str, Any]) -> None:
    said = r"is a config of Hydra.*`python train.py --cfg job` prints or the DeepSpeed JSON.*`unishard init`"
    with pytest.raises(ConfigError, match=said):
        recognise(open_source(document))


def test_what_hydra_prints_is_read_once_its_names_of_classes_are_gone() -> None:
    printed = {
        "trainer": {"_target_": "lightning.pytorch.trainer.Trainer", "devices": 2, "strategy": "deepspeed_stage_2"},
        "model": {"_target_": "my.Model", "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True}},
    }
    outcome = translate(printed, "unishard")
    assert [item.key for item in outcome.of(Fit.UNSUPPORTED)] == ["trainer._target_"]
    again = translate(printed, "unishard", drop=["trainer._target_"])
    assert not again.of(Fit.UNSUPPORTED)
    assert again.reading.config.sharding.strategy == "shard_grad_op"


@pytest.mark.parametrize("beside", [{}, {"strategy": {"target": "DeepSpeedStrategy", "params": {"stage": 2}}}])
def test_latent_diffusion_is_refused_with_what_to_write(beside: dict[str, Any]) -> None:
    document = {"model": {"target": "a.B"}, "lightning": {"trainer": {"accumulate_grad_batches": 2}, **beside}}
    with pytest.raises(ConfigError, match=r"is a config of latent-diffusion \(lightning\.trainer\).*; write what"):
        recognise(open_source(document))


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
        ("pipeline_model_parallel_size", 4, True),
        ("pipeline_model_parallel_size", 1, False),
        ("context_parallel_size", 2, True),
        ("sequence_parallel_size", 2, False),
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
