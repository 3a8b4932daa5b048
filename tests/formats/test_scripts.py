"""LLaMA-Factory, ms-swift and TRL: TrainingArguments with names and defaults of their own."""

from __future__ import annotations

from typing import Any

import pytest
from accounting import faults_of
from documents import LLAMAFACTORY, SWIFT, TRL

from unishard.contract.rules import Fit
from unishard.formats import Item, Outcome, read, translate
from unishard.formats.hf.shipped import shipped

BATCH = {"per_device_train_batch_size": 1, "output_dir": "o", "max_steps": 10}
FACTORY = {**BATCH, "stage": "sft", "finetuning_type": "full", "cutoff_len": 8, "bf16": True}
MS_SWIFT = {**BATCH, "model": "m", "tuner_type": "full", "torch_dtype": "bfloat16"}
SFT = {**BATCH, "model_name_or_path": "m", "completion_only_loss": True}


def item(outcome: Outcome, key: str) -> Item:
    (found,) = [one for one in outcome.items if one.key == key and not one.assumed]
    return found


@pytest.mark.parametrize("document", [*LLAMAFACTORY, *SWIFT, *TRL])
def test_in_its_own_format_a_file_keeps_what_its_tool_alone_reads(document: dict[str, Any]) -> None:
    name = read(document).format
    outcome = translate(document, name)
    assert not outcome.of(Fit.UNSUPPORTED)
    assert faults_of(outcome) == []
    for key in {
        "model",
        "model_name_or_path",
        "stage",
        "finetuning_type",
        "cutoff_len",
        "tuner_type",
        "dataset_name",
    } & document.keys():
        assert outcome.document[key] == document[key]
    assert read(outcome.document, name).config == read(document).config


# LLaMA-Factory.


@pytest.mark.parametrize(("off", "mode"), [({}, "full"), ({"disable_gradient_checkpointing": True}, "none")])
def test_llamafactory_recomputes_unless_told_not_to(off: dict[str, Any], mode: str) -> None:
    assert read({**FACTORY, **off}).config.activation_checkpointing == mode
    assert translate({**FACTORY, **off}, "llamafactory").document == {**FACTORY, **off}
    again = translate(translate({**FACTORY, **off}, "unishard").document, "llamafactory", from_="unishard").document
    assert again["disable_gradient_checkpointing"] == (mode == "none")
    assert "gradient_checkpointing" not in again


# ms-swift.


@pytest.mark.parametrize("name", [name for name in shipped("swift") if name != "fsdp2"])
def test_configs_that_ms_swift_brings_along_are_read_by_name(name: str) -> None:
    outcome = translate({**MS_SWIFT, "deepspeed": name}, "unishard")
    assert not outcome.of(Fit.UNSUPPORTED)
    assert faults_of(outcome) == []
    config = outcome.reading.config
    assert config.sharding.strategy == ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")[int(name[4])]
    assert config.offload.optimizer == ("cpu" if name.endswith("offload") else "none")
    assert config.precision.compute == "bf16"
    assert item(outcome, "deepspeed").value == name


def test_fsdp_of_ms_swift_is_a_config_too() -> None:
    outcome = translate({**MS_SWIFT, "fsdp": "fsdp2"}, "unishard")
    assert (outcome.reading.config.backend, outcome.reading.config.sharding.strategy) == ("fsdp", "full_shard")
    assert faults_of(outcome) == []
    written = translate(outcome.document, "swift", from_="unishard").document
    assert written["fsdp"]["fsdp"] == "full_shard auto_wrap"
    assert "fsdp_config" not in written
    assert read(written, "swift").config.sharding == outcome.reading.config.sharding


@pytest.mark.parametrize(("dtype", "compute"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp16")])
def test_ms_swift_computes_in_the_dtype_of_the_model(dtype: str, compute: str) -> None:
    assert read({**MS_SWIFT, "torch_dtype": dtype}).config.precision.compute == compute
    assert read({**MS_SWIFT, "torch_dtype": dtype, "bf16": True}).config.precision.compute == "bf16"


@pytest.mark.parametrize("engine", [{}, {"deepspeed": "zero2"}, {"fsdp": "fsdp2"}])
def test_without_a_dtype_the_models_own_config_decides(engine: dict[str, Any]) -> None:
    reading = read({**BATCH, "model": "m", "tuner_type": "lora", **engine})
    assert reading.undecided["precision.compute"].who == "torch_dtype, or the dtype in the model's config.json"
    assert reading.config.optimizer.lr == 1e-4  # of adapters


def test_hpz_and_processes_of_ms_swift() -> None:
    document = {**MS_SWIFT, "deepspeed": "zero3", "zero_hpz_partition_size": 4, "nproc_per_node": 8}
    outcome = translate(document, "unishard")
    assert outcome.reading.config.native["deepspeed"]["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert outcome.launch == "torchrun --nproc-per-node 8 train.py"


# TRL.


def test_trl_trains_in_bf16_and_recomputes_unless_told_otherwise() -> None:
    config = read(SFT).config
    assert (config.precision.compute, config.activation_checkpointing) == ("bf16", "full")
    assert read({**SFT, "fp16": True}).config.precision.compute == "fp16"
    assert read({**SFT, "gradient_checkpointing": False, "bf16": False}).config.activation_checkpointing == "none"
    assert read({**SFT, "torch_dtype": "float16"}).config.precision.compute == "bf16"  # only loads the model in it


@pytest.mark.parametrize(
    ("key", "rate"), [("completion_only_loss", 2e-5), ("reward_funcs", 1e-6), ("center_rewards_coefficient", 1e-4)]
)
def test_each_config_of_trl_has_its_learning_rate(key: str, rate: float) -> None:
    assert read({**BATCH, key: 1}).config.optimizer.lr == rate
    assert read({**BATCH, key: 1, "learning_rate": 3e-4}).config.optimizer.lr == 3e-4


def test_a_key_like_an_argument_that_does_not_train_is_the_scripts_own() -> None:
    document = {"per_device_train_batch_size": 2, "model_name_or_path": "m", "push_to_hf": False, "learning_rat": 1e-4}
    fits = {item.key: item.fit for item in translate(document, "unishard", from_="hf").items}
    assert (fits["push_to_hf"], fits["learning_rat"]) == (Fit.IGNORED, Fit.UNSUPPORTED)
