"""The checks of `unishard.tools.doctor.ranks` on processes that are started on this host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time

from unishard.tools.doctor.check import Check, Status

_SECONDS = 180.0
"""For which ranks on this host may run."""


def local_ranks(count: int) -> list[Check]:
    """The checks of `unishard.tools.doctor.ranks` on so many processes of this host."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    processes = []
    with tempfile.TemporaryDirectory(prefix="unishard-doctor-") as folder:
        try:
            for rank in range(count):
                environ = {
                    **os.environ,
                    **{name: str(value) for name, value in shared.items()},
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
                with open(f"{folder}/{rank}.out", "w") as out, open(f"{folder}/{rank}.err", "w") as err:
                    command = [sys.executable, "-m", "unishard.tools.doctor.ranks"]
                    processes.append(
                        subprocess.Popen(command, env=environ, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
                    )
            return _collected(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _collected(processes: list[subprocess.Popen[bytes]], folder: str) -> list[Check]:
    deadline = time.monotonic() + _SECONDS
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return [
                Check(
                    "ranks",
                    Status.FAIL,
                    f"rank {rank} did not end within {_SECONDS:.0f} s",
                    "run it again on an idle machine",
                )
            ]
    checks: list[Check] = []
    for rank, process in enumerate(processes):
        with open(f"{folder}/{rank}.out") as out, open(f"{folder}/{rank}.err", errors="replace") as err:
            text, errors = out.read(), err.read()
        try:
            checks += [Check(**{**values, "status": Status(values["status"])}) for values in json.loads(text)]
        except ValueError:
            last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            return [Check("ranks", Status.FAIL, f"rank {rank} failed: {last}", "repair what the message names")]
    return checks
