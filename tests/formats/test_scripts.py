"""LLaMA-Factory and TRL: TrainingArguments with names and defaults of their own."""

from __future__ import annotations

from typing import Any

import pytest
from accounting import faults_of
from documents import SEEDS

from unishard.contract.rules import Fit
from unishard.formats import read, translate

BATCH = {"per_device_train_batch_size": 1, "output_dir": "o", "max_steps": 10}
FACTORY = {**BATCH, "stage": "sft", "finetuning_type": "full", "cutoff_len": 8, "bf16": True}


@pytest.mark.parametrize("document", [*SEEDS["llamafactory"], *SEEDS["trl"]])
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
