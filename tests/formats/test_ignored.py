"""Keys that other tools have and a config does not need: lists in data, left out with a reason, kept where the tool itself
reads them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import SEEDS

from unishard.config import Logging
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats import names, translate

FOLDER = Path(names.__file__).parent
LOGS: dict[str, dict[str, Any]] = {
    "hf": {"report_to": ["wandb"], "run_name": "a", "logging_steps": 5},
    "trl": {"report_to": "wandb", "logging_steps": 5},
    "lightning": {"logger": {"class_path": "lightning.pytorch.loggers.CSVLogger"}, "log_every_n_steps": 5},
}


@pytest.mark.parametrize("tool", LOGS)
def test_logs_of_other_tools_are_left_out(tool: str) -> None:
    base = {"strategy": "fsdp"} if tool == "lightning" else SEEDS[tool][0]
    outcome = translate({**base, **LOGS[tool]}, "unishard", from_=tool)
    found = [item for item in outcome.items if item.key.split(".")[0] in LOGS[tool]]
    assert {item.key.split(".")[0] for item in found} == LOGS[tool].keys()
    assert {(item.fit, item.note) for item in found} == {
        (Fit.IGNORED, "affects only logs; write your own logging section")
    }
    assert not {"logging", "profile"} & outcome.document.keys()


@pytest.mark.parametrize("tool", ["hf", "deepspeed", "accelerate"])
def test_a_logging_section_is_left_out_and_said(tool: str) -> None:
    config = {"backend": "deepspeed" if tool == "deepspeed" else "fsdp", "logging": {"to": ["tensorboard"], "dir": "d"}}
    Logging.model_validate(config["logging"])
    found = {item.key: item for item in translate(config, tool, from_="unishard").items}
    assert (found["logging.to"].fit, found["logging.dir"].fit) == (Fit.IGNORED, Fit.IGNORED)
    assert "affects only logs" in found["logging.to"].note


def test_what_the_tool_reads_again_is_kept() -> None:
    data = {"per_device_train_batch_size": 2, "report_to": ["wandb"], "logging_steps": 5, "eval_steps": 3}
    assert translate(data, "hf", from_="hf", overrides=["training.seed=3"]).document.items() >= data.items()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.txt")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_each_name_stands_in_one_list_with_a_reason(path: Path) -> None:
    rows = names.ignored(str(path.relative_to(FOLDER)))
    listed = [name for line in path.read_text().splitlines() if line[:1].isspace() for name in line.split()]
    assert sorted(rows) == sorted(listed)
    assert all(row.note and row.fit in (Fit.IGNORED, Fit.UNSUPPORTED) for row in rows.values())


def test_what_is_only_read_is_never_written() -> None:
    said = (
        r"--to lightning: configs of .* are read and never written; train with unishard\.integrations\.lightning or the "
        r"unishard file, or write --to .*hf"
    )
    with pytest.raises(ConfigError, match=said):
        translate({"zero_optimization": {"stage": 2}}, "lightning")
    assert translate(SEEDS["lightning"][0], "unishard", from_="lightning").reading.format == "lightning"
