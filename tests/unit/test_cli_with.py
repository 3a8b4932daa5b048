"""`unishard translate --with`: what it reads beside a config, and what the report says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import pasted, run

DEEPSPEED = (
    '{"zero_optimization": {"stage": 2},\n"gradient_clipping": "auto",\n"train_micro_batch_size_per_gpu": "auto"}'
)
SCRIPT = (
    "deepspeed --num_gpus 2 train.py \\\n  --per_device_train_batch_size 4 --mine 3 \\\n  --save_steps 10 "
    "--save_strategy no --bf16\n"
)


@pytest.fixture(autouse=True)
def _files(config: Path) -> None:
    Path("ds.json").write_text(DEEPSPEED)
    Path("train.sh").write_text(SCRIPT)


def test_the_report_names_each_value_and_its_place() -> None:
    result = run("translate", "ds.json", "--to", "deepspeed", "--with", "train.sh")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["train_micro_batch_size_per_gpu"] == 4
    assert result.stderr == (
        "ds.json, with train.sh\n"
        "filled in:\n"
        "  per_device_train_batch_size = 4 -> train_micro_batch_size_per_gpu\n"
        "      (train.sh:2)\n"
        "  max_grad_norm = 1.0 -> gradient_clipping  (default of TrainingArguments\n"
        "      (transformers 5.23))\n"
        "not understood in train.sh: mine\n"
        "launch:\n"
        "  torchrun --nproc-per-node 2 train.py\n"
        "deepspeed -> deepspeed: 3 of 3 keys carried over (--report full lists all)\n"
    )


def test_the_report_for_programs() -> None:
    said = json.loads(run("translate", "ds.json", "--to", "deepspeed", "--with", "train.sh", "--report", "json").stderr)
    assert said["not_understood"] == ["mine"]
    places = {item["key"]: (item["place"], item["beside"]) for item in said["items"] if item["place"]}
    assert places["per_device_train_batch_size"] == ("train.sh:2", True)
    assert places["train_micro_batch_size_per_gpu"] == ("train.sh:2", False)
    assert "not_understood" not in json.loads(
        run("translate", "ds.json", "--to", "deepspeed", "--report", "json").stderr
    )


@pytest.mark.parametrize("words", [["--with", "--"], ["--"]])
def test_arguments_behind_a_double_dash(words: list[str]) -> None:
    result = run(
        "translate",
        "ds.json",
        "--to",
        "unishard",
        "--set",
        "training.gradient_clipping=2",
        *words,
        "--per_device_train_batch_size",
        "3",
    )
    assert result.exit_code == 0
    assert "micro_batch_size: 3\n" in result.stdout
    assert (
        "  per_device_train_batch_size = 3 -> training.micro_batch_size  (the command\n      line)\n" in result.stderr
    )


def test_a_line_that_starts_a_training_behind_a_double_dash() -> None:
    result = run("translate", "ds.json", "--to", "unishard", "--", *SCRIPT.replace("\\\n", "").split())
    assert result.exit_code == 0
    assert "launch:\n  torchrun --nproc-per-node 2 train.py\n" in result.stderr


def test_what_is_no_argument() -> None:
    result = run("translate", "ds.json", "other.json", "--to", "unishard")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("other.json: unexpected argument; name one config, ")
    result = run("translate", "ds.json", "--to", "unishard", "--with", "train.sh", "--", "--bf16")
    assert result.exit_code == 2
    assert "give a file with --with, or arguments behind --, not both" in result.stderr


@pytest.mark.parametrize(
    ("words", "end"), [(["--with", "train.sh"], ""), (["--", "--max_grad_norm", "1"], " -- --max_grad_norm 1")]
)
def test_the_command_that_works_has_them_too(words: list[str], end: str) -> None:
    Path("ds.json").write_text(DEEPSPEED.replace('"auto",', "0.5,"))
    result = run("translate", "ds.json", "--to", "unishard", *words)
    assert result.exit_code == 1
    command = " ".join(pasted(result.stderr)[0])
    assert command.endswith(end)
    assert ("--with train.sh" in command) is not end
    again = run(*command.replace("unishard ", "", 1).split())
    assert again.exit_code == 0, again.stderr
