"""transformers' Trainer saves when and where the config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Trainer, TrainingArguments

from unishard.formats import translate


class Line(torch.nn.Module):
    """The smallest model that transformers' Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


DATA = [{"x": torch.ones(1)}] * 7


@pytest.mark.parametrize(
    ("section", "steps"), [({"every_steps": 2}, [2, 4, 6, 7]), ({"every_steps": 2, "keep_last": 2}, [6, 7]), ({}, [])]
)
def test_trainer_saves_at_these_steps(section: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    config = {
        "sharding": "no_shard",
        "checkpoint": {"dir": str(tmp_path / "out"), **section},
        "scheduler": {"name": "linear", "total_steps": 7},
    }
    arguments = TrainingArguments(
        **yaml.safe_load(translate(config, "hf", from_="unishard").text), use_cpu=True, report_to=[], disable_tqdm=True
    )
    Trainer(Line(), arguments, train_dataset=DATA).train()
    assert (
        sorted(int(path.name.removeprefix("checkpoint-")) for path in (tmp_path / "out").glob("checkpoint-*")) == steps
    )


def test_training_arguments_take_what_is_said_of_signals(tmp_path: Path) -> None:
    config = {"checkpoint": {"dir": str(tmp_path), "on_signal": ["TERM"]}, "sharding": "no_shard"}
    arguments = TrainingArguments(**yaml.safe_load(translate(config, "hf", from_="unishard").text), use_cpu=True)
    assert arguments.enable_jit_checkpoint is True
    assert arguments.save_strategy == "no"
