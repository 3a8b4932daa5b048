"""`unishard translate --with`: what it reads beside a config, and what the report says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import one_line, pasted, run

DEEPSPEED = (
    '{"zero_optimization": {"stage": 2},\n"gradient_clipping": "auto",\n"train_micro_batch_size_per_gpu": "auto"}'
)
COMMAND = (
    "deepspeed --num_gpus 2 train.py --per_device_train_batch_size 4 --mine 3 --save_steps 10 --save_strategy no --bf16"
)


@pytest.fixture(autouse=True)
def _files(config: Path) -> None:
    Path("ds.json").write_text(DEEPSPEED)


def test_the_report_names_each_value_and_its_place() -> None:
    result = run("translate", "ds.json", "--to", "deepspeed", "--with", COMMAND)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["train_micro_batch_size_per_gpu"] == 4
    assert result.stderr == (
        "ds.json, with the command\n"
        "filled in:\n"
        "  per_device_train_batch_size = 4 -> train_micro_batch_size_per_gpu  (the\n"
        "      command)\n"
        "  max_grad_norm = 1.0 -> gradient_clipping  (default of TrainingArguments\n"
        "      (transformers 5.23))\n"
        "not understood in the command: mine\n"
        "launch:\n"
        "  torchrun --nproc-per-node 2 train.py\n"
        "deepspeed -> deepspeed: 3 of 3 keys carried over (--report full lists all)\n"
    )


def test_the_report_for_programs() -> None:
    said = json.loads(run("translate", "ds.json", "--to", "deepspeed", "--with", COMMAND, "--report", "json").stderr)
    assert said["not_understood"] == ["mine"]
    places = {item["key"]: (item["place"], item["beside"]) for item in said["items"] if item["place"]}
    assert places["per_device_train_batch_size"] == ("the command", True)
    assert places["train_micro_batch_size_per_gpu"] == ("the command", False)
    assert "not_understood" not in json.loads(
        run("translate", "ds.json", "--to", "deepspeed", "--report", "json").stderr
    )


@pytest.mark.parametrize("words", [["--", "--learning_rate", "1e-4"], ["--with", "--", "--bf16"]])
def test_arguments_behind_a_double_dash_are_refused(words: list[str]) -> None:
    result = run("translate", "ds.json", "--to", "unishard", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give the command that trains in quotes: --with 'COMMAND'" in one_line(result.stderr)


def test_a_script_or_a_page_is_refused_with_what_to_write() -> None:
    Path("run.sh").write_text(COMMAND)
    for name in ("run.sh", "run.sh:1", "README.md", "no.slurm"):
        result = run("translate", "ds.json", "--to", "unishard", "--with", name)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "give the one command that trains, in quotes: --with 'accelerate launch" in one_line(result.stderr)


def test_the_command_that_works_has_it_too() -> None:
    Path("ds.json").write_text(DEEPSPEED.replace('"auto",', "0.5,"))
    result = run("translate", "ds.json", "--to", "unishard", "--with", COMMAND)
    assert result.exit_code == 1
    command = pasted(result.stderr)[0]
    assert command[command.index("--with") + 1] == COMMAND
    again = run(*command[1:])
    assert again.exit_code == 0, again.stderr
