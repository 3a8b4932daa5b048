"""`unishard compare` for real: a script that would go on for ever on one engine, and fails on the other."""

from __future__ import annotations

import json
import os
import sys

import pytest
from forking import completed

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys
from pathlib import Path

import unishard
from unishard.testing.models import MODELS, batch

cfg = unishard.load()
if cfg.backend == sys.argv[1]:
    raise ValueError("not today")
try:
    with unishard.prepare(MODELS["mlp"].build(), cfg) as engine:
        while True:
            for micro_batch in engine.batches([batch("mlp", 0, 2)] * 8):
                engine.backward(engine(**micro_batch).loss)
                engine.step()
finally:
    Path("went-on").touch()
"""


def test_every_candidate_is_measured_and_ended(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "backend: fsdp\ntraining: {micro_batch_size: 2}\noptimizer: {name: sgd, lr: 0.1}\n"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    words = "compare c.yaml --processes-per-node 2 --steps 5 --rounds 1 --out logs --json train.py deepspeed"
    done = completed([sys.executable, "-m", "unishard", *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["1/2 fsdp full_shard", "2/2 deepspeed full_shard"]
    measured, failed = json.loads(done.stdout)["candidates"]
    assert (measured["steps"], measured["failure"]) == (5, None)
    assert measured["first_step_seconds"] > measured["step_seconds"] > 0
    assert measured["samples_per_second"] == pytest.approx(4 / measured["step_seconds"], rel=0.5)
    assert measured["memory_gib"] > 0
    assert measured["planned_sent_gib"] > 0
    assert failed["failure"].startswith("ValueError: not today")
    assert not (tmp_path / "went-on").exists(), "no code of the script runs after its last step"
    assert {path.name for path in (tmp_path / "logs" / "fsdp-full_shard").iterdir()} == {"log.jsonl", "output.txt"}


MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return self.inner(x).square().mean()


def build():
    return Model(), lambda samples, tokens: {"x": torch.randn(samples, tokens, 16)}
"""


def test_tune_measures_what_fits_and_writes_the_best(tmp_path):
    """The config as it is accumulates; the plan drops a micro-batch of all samples, which does not fit. One rank: above
    there are two."""
    (tmp_path / "c.yaml").write_text(
        "backend: fsdp  # ours\nsharding: no_shard\ntraining: {gradient_accumulation_steps: 8}\n"
    )
    (tmp_path / "factories.py").write_text(MODEL)
    words = (
        "tune c.yaml --model factories:build --seq-len 1024 --memory 700KiB --processes-per-node 1 --steps 3 "
        "--most 2 --write --json"
    )
    command = [sys.executable, "-m", "unishard", *words.split(), "--backends", "fsdp", "--strategies", "no_shard"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = completed(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    own, other = found["candidates"]
    assert (own["micro_batch_size"], own["accumulation"], own["failure"]) == (1, 8, None)
    assert other["micro_batch_size"] * other["accumulation"] == 8
    assert (other["micro_batch_size"] > 1, other["failure"], other["steps"]) == (True, None, 3)
    largest = next(left for left in found["left_out"] if left["candidate"] == "fsdp no_shard, none, 8 x 1")
    assert largest["reason"].startswith("does not fit: needs ")
    text = (tmp_path / "c.yaml").read_text()
    assert text.startswith("# unishard tune: fsdp no_shard, none, ")
    assert "backend: fsdp  # ours\n" in text
