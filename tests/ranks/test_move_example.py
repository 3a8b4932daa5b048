"""examples/move_between_engines.sh, shortened: its commands are run in forked ranks, since starting torchrun four times
costs a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness import run_script
from transformers import AutoModelForCausalLM

from unishard.checkpoint.tensor_reader import Tensors
from unishard.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = 7
"""How many times fewer updates than the shell script asks for."""


class Command(NamedTuple):
    """A line of the shell script."""

    ranks: int
    script: str
    arguments: list[str]


def shell(programs, out):
    """Runs the shell script with programs that only print how they were called."""
    for name in ("torchrun", "python"):
        program = programs / name
        program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n", encoding="utf-8")
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", str(EXAMPLES / "move_between_engines.sh"), str(out), "--samples", "80"]  # 5 updates in an epoch
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def parsed(line):
    words = json.loads(line)[1:]
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    arguments = words[at + 1 :]
    if "--steps" in arguments:
        arguments += ["--steps", str(int(arguments[arguments.index("--steps") + 1]) // SHORT)]
    return Command(ranks, words[at], arguments)


def run_scripts(script, *calls):
    sys.path.insert(0, str(EXAMPLES))  # as python does for a script
    for arguments in calls:
        run_script(script, *arguments)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What the shell script leaves behind."""
    folder = tmp_path_factory.mktemp("move")
    (folder / "bin").mkdir()
    done = shell(folder / "bin", folder / "out")
    assert done.returncode == 0, done.stderr
    first, second, third, stayed, drawing = map(parsed, done.stdout.splitlines())
    assert (first.ranks, first.script) == (stayed.ranks, stayed.script)
    run_ranks(first.ranks, run_scripts, first.script, first.arguments, stayed.arguments)
    run_ranks(second.ranks, run_scripts, second.script, second.arguments)
    run_ranks(third.ranks, run_scripts, third.script, third.arguments)
    run_ranks(1, run_scripts, drawing.script, drawing.arguments)
    return folder / "out"


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.deep
def test_the_run_that_moved_trains_as_the_one_that_did_not(out):
    moved, stayed = read(out / "moved.jsonl"), read(out / "stayed.jsonl")
    assert [line["update"] for line in moved] == [line["update"] for line in stayed] == list(range(1, 13))
    places = ["fsdp full_shard, 2 ranks", "deepspeed full_shard, 4 ranks", "deepspeed shard_optimizer, 1 rank"]
    assert [line["run"] for line in moved] == [place for place in places for _ in range(4)]
    assert {line["run"] for line in stayed} == {places[0]}
    assert [line["loss"] for line in moved] == pytest.approx([line["loss"] for line in stayed], rel=1e-6, abs=0)
    assert moved[-1]["loss"] < moved[0]["loss"] - 1


@pytest.mark.deep
def test_transformers_loads_what_it_exported_the_weights_of_the_uninterrupted_run(out):
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    expected = Tensors(out / "stayed" / "step-00000012")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected.full(f"model.{name}"), rtol=1e-3, atol=1e-5)


@pytest.mark.deep
def test_the_picture_is_drawn(out):
    assert (out / "resuming.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_there_is_not_gone_on_with(tmp_path):
    done = shell(tmp_path, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{tmp_path} already exists" in done.stderr
