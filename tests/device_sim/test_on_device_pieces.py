"""The pieces of `make gpu` with tiny sizes: as on a GPU, but for what only a GPU can measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.gpu.pieces import PIECES

ROOT = Path(__file__).resolve().parents[2]
NOT_JUDGED = {
    "trains while it is written": "the tiny checkpoint is written before the first step ends",
    "prints nothing but warnings": "torch says that there is no Triton",
}


def play(piece: str, folder: Path) -> str:
    """What a piece prints."""
    command = [sys.executable, "-m", "benchmarks.gpu.piece", piece, "--device", "cuda", "--out", str(folder)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=540, check=False
    ).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pieces")


@pytest.fixture(scope="module")
def played(request, folder) -> Iterator[dict[str, Future[str]]]:
    """All pieces that are asked for, two at a time: most have one rank, which leaves a core idle."""
    asked = [item.callspec.params["piece"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(2) as pool:
        yield {piece: pool.submit(play, piece, folder) for piece in asked}


@pytest.mark.parametrize("piece", [piece.name for piece in PIECES])
def test_a_piece_ends_without_a_failure(piece, played, folder):
    said = played[piece].result()
    report = json.loads((folder / f"{piece}-cuda.json").read_text())
    judged = [check for check in report["checks"] if check["name"].partition(": ")[2] not in NOT_JUDGED]
    failed = [f"{check['name']}: {check['detail']}" for check in judged if check["verdict"] == "fail"]
    assert failed == [], said[-3000:]
    assert report["hardware"].endswith("(simulated)")
