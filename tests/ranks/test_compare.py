"""`unishard compare` for real: a script that would go on for ever on one engine, and fails on the other."""

from __future__ import annotations

import json
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
