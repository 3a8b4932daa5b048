"""Each program in benchmarks/ ends well in its shortest form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SHORTEST = (
    "calls --backend fsdp --strategy full_shard",
    "checkpoint --hidden 64 --layers 2 --rounds 1",
    "desync --backend fsdp --strategy full_shard --rounds 5",
    "first_step --engine fsdp --ranks 1 --model tiny --no-compile --seconds 1",
    "frameworks --framework fabric --engine fsdp --seconds 1",
    "goodput --hidden 64 --layers 2 --rounds 1",
    "held",
    "muon --ranks 2 --turns 1",
    "parallel --rounds 1",
    "peers --engine fsdp --strategy full_shard --precision fp32 --model tiny --seconds 1",
    "scale --ranks 2 --chunks 1000",
    "sequence --engine fsdp --rounds 1 --budget 0",
    "stream --hidden 64 --layers 2 --rounds 1",
    "translate --runs 1",
)


@pytest.mark.deep
@pytest.mark.parametrize("program", SHORTEST)
def test_measures(program: str) -> None:
    name, *options = program.split()
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout
