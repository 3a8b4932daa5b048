"""LLaMA-Factory, ms-swift and TRL: TrainingArguments with names and defaults of their own."""

from __future__ import annotations

from typing import Any

import pytest
from accounting import faults_of
from documents import SEEDS

from unishard.contract.rules import Fit
from unishard.formats import Item, Outcome, read, translate
from unishard.formats.hf.shipped import shipped

BATCH = {"per_device_train_batch_size": 1, "output_dir": "o", "max_steps": 10}
FACTORY = {**BATCH, "stage": "sft", "finetuning_type": "full", "cutoff_len": 8, "bf16": True}
MS_SWIFT = {**BATCH, "model": "m", "tuner_type": "full", "torch_dtype": "bfloat16"}


def item(outcome: Outcome, key: str) -> Item:
    (found,) = [one for one in outcome.items if one.key == key and not one.assumed]
    return found


@pytest.mark.parametrize("document", [*SEEDS["llamafactory"], *SEEDS["swift"], *SEEDS["trl"]])
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
    again = translate({**FACTORY, **off}, "llamafactory").document
    assert again.items() >= {**FACTORY, **off}.items()
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
