"""examples/train_gpt.py: learns on both engines, resumes where it was, and logs each step once; the files beside it are
valid."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import pytest
from harness import run_script

import unishard
from unishard.testing import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
SMALL = ("--length", "32", "--width", "32", "--layers", "2", "--evaluate-every", "4", "--sample", "8")


def train(folder, backend, *changes):
    """Run the script as a launcher would, once for each tuple of overrides."""
    every = [
        "scheduler.total_steps=12",
        "scheduler.warmup_steps=2",
        "optimizer.lr=0.01",
        f"checkpoint.dir={folder}/runs",
    ]
    every += [
        f"backend={backend}",
        "checkpoint.every_steps=4",
        "logging.every_steps=2",
        f"logging.dir={folder}/runs/logs",
    ]
    for own in changes:
        changes = [word for change in (*every, *own) for word in ("--set", change)]
        run_script(SCRIPT, *SMALL, "--text", f"{folder}/text", *changes)


@cache
def logged(backend):
    """The log of a run that ends at step 8 and one that resumes it, by step."""
    with TemporaryDirectory() as folder:
        Path(folder, "text").write_text("\n".join(topics.values())[:40_000], encoding="utf-8")
        run_ranks(2, train, folder, backend, ["scheduler.total_steps=8"], [], timeout=200)
        lines = [
            json.loads(line)
            for line in Path(folder, "runs", "logs", "log.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        saved = sorted(path.name for path in Path(folder, "runs").glob("step-*"))
    return lines, saved


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_it_learns_and_resumes(backend):
    lines, saved = logged(backend)
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8, 10, 12], "each step once"
    assert losses[12] < losses[2] - 0.5
    evaluated = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert list(evaluated) == [4, 8, 12]
    assert evaluated[12] < evaluated[4]
    assert saved == ["step-00000008", "step-00000012"]


def test_both_engines_train_the_same():
    one, other = ([line["loss"] for line in logged(backend)[0] if "loss" in line] for backend in ("fsdp", "deepspeed"))
    assert other == pytest.approx(one, rel=1e-4)


def test_the_files_beside_it_are_valid():
    for backend in ("fsdp", "deepspeed"):
        unishard.translate(unishard.load(SCRIPT.with_suffix(".yaml")), backend=backend).check(strict=False)
    subprocess.run(["bash", "-n", SCRIPT.with_suffix(".sbatch")], check=True)
    named = re.findall(r"examples/train_gpt[\w.]*", SCRIPT.with_suffix(".sbatch").read_text() + SCRIPT.read_text())
    assert all((EXAMPLES.parent / name).is_file() for name in named)
