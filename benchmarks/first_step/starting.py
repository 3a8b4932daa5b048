"""Starts the ranks of a candidate, each an interpreter of its own, as a launcher does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.first_step.phases import until_the_first
from benchmarks.peers.cell import Cell

LIMIT = 900.0
"""Seconds after which a rank that has not made its steps counts as hung."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def start(candidate: str, cell: Cell, world: int, compiled: Path | None = None) -> dict[str, float]:
    """Seconds of each phase and of CPU, of the rank that was the last to end its first step.

    Args:
        candidate: One of `phases.OWN`, or `phases.COMPILED`.
        cell: What it trains.
        world: Ranks.
        compiled: Where torch.compile keeps what it has made; by default in a folder that is new.

    Raises:
        RuntimeError: A rank failed; with the last lines that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        cache = compiled or Path(folder, "compiled")
        shared = QUIET | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        words = [sys.executable, "-m", "benchmarks.first_step.phases", str(time.time())]
        logs = [Path(folder, f"log{rank}") for rank in range(world)]
        ranks = []
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as output:
                command = [*words, str(Path(folder, f"rank{rank}")), candidate, *cell]
                ranks.append(subprocess.Popen(command, env=os.environ | shared | own, stdout=output, stderr=output))
        await_all(ranks, logs)
        found = [json.loads(Path(folder, f"rank{rank}").read_text()) for rank in range(world)]
    return max(found, key=until_the_first)


def await_all(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Wait for all ranks; the first that fails ends the others."""
    deadline = time.monotonic() + LIMIT
    try:
        while any(code is None for code in [each.poll() for each in ranks]):
            failed = [at for at, each in enumerate(ranks) if each.returncode]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        failed = [at for at, each in enumerate(ranks) if each.poll() != 0]
        if failed:
            said = logs[failed[0]].read_text(errors="replace")[-2000:]
            raise RuntimeError(f"rank {failed[0]} ended with {ranks[failed[0]].returncode}:\n{said}")
    finally:
        for each in ranks:
            each.kill()
            each.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
