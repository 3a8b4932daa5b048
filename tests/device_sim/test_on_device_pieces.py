"""The pieces of `make gpu` with tiny sizes: as on a GPU, but for what only a GPU can measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.pieces import PIECES

ROOT = Path(__file__).resolve().parents[2]
NOT_JUDGED = {
    "trains while it is written": "the tiny checkpoint is written before the first step ends",
    "prints nothing but warnings": "torch says that there is no Triton",
}


@pytest.mark.parametrize("piece", [piece.name for piece in PIECES])
def test_a_piece_ends_without_a_failure(piece, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu.piece", piece, "--device", "cuda", "--out", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=540, check=False)
    report = json.loads((tmp_path / f"{piece}-cuda.json").read_text())
    judged = [check for check in report["checks"] if check["name"].partition(": ")[2] not in NOT_JUDGED]
    failed = [f"{check['name']}: {check['detail']}" for check in judged if check["verdict"] == "fail"]
    assert failed == [], found.stdout[-3000:]
    assert report["hardware"].endswith("(simulated)")
