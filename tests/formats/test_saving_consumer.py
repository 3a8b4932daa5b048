"""The tools themselves save when and where the config says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import Trainer as HfTrainer
from transformers import TrainingArguments

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
    HfTrainer(Line(), arguments, train_dataset=DATA).train()
    assert (
        sorted(int(path.name.removeprefix("checkpoint-")) for path in (tmp_path / "out").glob("checkpoint-*")) == steps
    )


def test_training_arguments_take_what_is_said_of_signals(tmp_path: Path) -> None:
    config = {"checkpoint": {"dir": str(tmp_path), "on_signal": ["TERM"]}, "sharding": "no_shard"}
    arguments = TrainingArguments(**yaml.safe_load(translate(config, "hf", from_="unishard").text), use_cpu=True)
    assert arguments.enable_jit_checkpoint is True
    assert arguments.save_strategy == "no"


class Module(LightningModule):
    """The same for Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("section", "steps"),
    [
        ({"every_steps": 2}, [2, 4, 6]),
        ({"every_steps": 2, "keep_last": 1}, [6]),
        ({"every_steps": 2, "keep_last": 2}, [4, 6]),
        ({"every_steps": 3, "every_minutes": 60.0}, [3, 6]),
        ({}, []),
    ],
)
def test_lightning_saves_at_these_steps(section: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    config = {"sharding": "no_shard", "checkpoint": {"dir": str(tmp_path / "out"), **section}}
    namespace: dict[str, Any] = {}
    exec(compile(translate(config, "lightning", from_="unishard").text, "snippet", "exec"), namespace)
    made = namespace["trainer"]()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(
        max_steps=7,
        callbacks=list(made.checkpoint_callbacks),
        enable_checkpointing=bool(made.checkpoint_callbacks),
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(Module(), DataLoader(torch.ones(7, 1)))
    found = (tmp_path / "out").glob("*.ckpt")
    assert sorted(int(path.stem.rpartition("step=")[2]) for path in found) == steps
