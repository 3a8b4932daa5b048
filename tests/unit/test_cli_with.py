"""`unishard translate --with`: what it reads beside a config, and what the report says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import pasted, run

DEEPSPEED = (
    '{"zero_optimization": {"stage": 2},\n"gradient_clipping": "auto",\n"train_micro_batch_size_per_gpu": "auto"}'
)
COMMAND = (
    "deepspeed --num_gpus 2 train.py --per_device_train_batch_size 4 --mine 3 --save_steps 10 --save_strategy no --bf16"
)


@pytest.fixture(autouse=True)
def _files(config: Path) -> None:
    Path("ds.json").write_text(DEEPSPEED)


def test_the_report_for_programs() -> None:
    said = json.loads(run("translate", "ds.json", "--to", "deepspeed", "--with", COMMAND, "--report", "json").stderr)
    assert said["not_understood"] == ["mine"]
    places = {item["key"]: (item["place"], item["beside"]) for item in said["items"] if item["place"]}
    assert places["per_device_train_batch_size"] == ("the command", True)
    assert places["train_micro_batch_size_per_gpu"] == ("the command", False)
    assert "not_understood" not in json.loads(
        run("translate", "ds.json", "--to", "deepspeed", "--report", "json").stderr
    )


def test_the_command_that_works_has_it_too() -> None:
    Path("ds.json").write_text(DEEPSPEED.replace('"auto",', "0.5,"))
    result = run("translate", "ds.json", "--to", "unishard", "--with", COMMAND)
    assert result.exit_code == 1
    command = pasted(result.stderr)[0]
    assert command[command.index("--with") + 1] == COMMAND
    again = run(*command[1:])
    assert again.exit_code == 0, again.stderr
