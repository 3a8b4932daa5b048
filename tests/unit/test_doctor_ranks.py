"""What `unishard doctor` says of the ranks on a machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from forking import in_a_fork
from running import run

from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.local_ranks import local_ranks

RANKS = ("ranks", "versions of the ranks", "gloo")


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_ranks_on_this_host_are_connected() -> None:
    found = by_name(in_a_fork(local_ranks, 2))
    assert tuple(found) == RANKS
    assert {check.status for check in found.values()} == {Status.OK}
    assert found["ranks"].details["world_size"] == 2
    assert found["ranks"].details["hosts"] == {socket.gethostname(): 2}
    assert found["gloo"].found == "all-reduce over 2 ranks"


def test_a_rank_that_cannot_start_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (check,) = local_ranks(2)
    assert (check.status, check.found) == (Status.FAIL, "rank 0 failed: exit code 1")


def reported() -> list[tuple[int, str]]:
    """How each of two ranks that run the command ends, and what it prints."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "unishard", "doctor", "--json"]
    started = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, printed, strict=True)]


def test_ranks_of_a_launcher_report_once() -> None:
    """Each rank runs the command, as under torchrun; the second one is never started in the other case."""
    (code, first), (other_code, second) = in_a_fork(reported)
    assert (code, other_code) == (0, 0)
    assert second == ""
    checks: list[dict[str, Any]] = json.loads(first)["checks"]
    assert {*RANKS, "python", "launcher"} <= {check["name"] for check in checks}


def test_a_launcher_and_ranks_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    result = run("doctor", "--ranks", "2")
    assert result.exit_code == 2
    assert "leave --ranks out" in result.stderr
