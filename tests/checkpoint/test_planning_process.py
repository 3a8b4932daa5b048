"""The child process in which the first rank plans large background saves: its answers, its errors and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from unishard.checkpoint import plan_cache, planning_process
from unishard.checkpoint.holdings import intervals_of, packed
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import Packed, Planning, RankResult
from unishard.checkpoint.planning_process import PlanningProcess
from unishard.distributed.lazy_shards import LazyShard


def rank(begin: int, end: int) -> tuple[Packed, Packed]:
    held = {"model.a": LazyShard(torch.Size((10,)), torch.float32, begin, end, lambda first, last: torch.empty(0))}
    return packed(intervals_of(held)), packed(intervals_of({}))


def results(*ranks: int) -> list[RankResult]:
    nothing = np.zeros(0, np.int64)
    sums = [[np.zeros(count, kind) for count in (1, 0)] for kind in (np.uint64, np.float64)]
    return [
        RankResult(f"__{number}_0.distcp", size, 0, [np.array([size]), nothing], *sums)
        for number, size in enumerate(ranks)
    ]


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def ends(pid: int) -> bool:
    limit = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    return gone(pid)


@pytest.fixture(scope="module")
def process() -> Iterator[PlanningProcess]:
    started = PlanningProcess()
    yield started
    started.close()
    assert gone(started.pid)


def test_it_answers_and_fails_as_planning_does(process: PlanningProcess, tmp_path: Path) -> None:
    for planning in (Planning(), process):
        folder = tmp_path / type(planning).__name__
        folder.mkdir()
        with pytest.raises(ValueError, match=r"^ranks hold overlapping elements of model\.a$"):
            planning.plan(1 << 24, [rank(0, 6), rank(5, 10)])
        assert planning.plan(1 << 24, [rank(0, 6), rank(6, 10)]) == [(b"\x80", b""), (b"\x80", b"")]
        with pytest.raises(ValueError, match="has not written the records"):
            planning.finish(folder, {}, results(24, 16, 1))
        with pytest.raises(FileNotFoundError) as missing:
            planning.finish(folder / "none", {}, results(24, 16))
        assert missing.value.filename == str(folder / "none" / ".metadata.tmp")
        written = planning.finish(folder, {"model.b": "model.a"}, results(24, 16))
        assert set(written.files) == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
        assert written.shapes == {"model.a": (10,), "model.b": (10,)}
    indexes = [(tmp_path / kind.__name__ / ".metadata").read_bytes() for kind in (Planning, PlanningProcess)]
    assert indexes[0] == indexes[1]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_it_is_no_rank_and_outlives_the_signals_of_a_cluster(process: PlanningProcess) -> None:
    environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert {b"CUDA_VISIBLE_DEVICES=", b"RANK=0", b"WORLD_SIZE=1"} <= {*environment}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process.pid, number)
    process.require()
    assert process.plan(1 << 24, [rank(0, 10)]) == [(b"\x80", b"")]


PARENT = """
import os, time
from unishard.checkpoint.planning_process import PlanningProcess
if __name__ == "__main__":
    print(PlanningProcess().pid, os.fork() or time.sleep(60), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Also while a process that the parent has forked holds the pipe open."""
    (tmp_path / "script.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, fork = map(int, parent.stdout.readline().split())
        assert not gone(pid)
        parent.kill()
    try:
        assert not gone(fork)
        assert ends(pid)
    finally:
        os.kill(fork, signal.SIGKILL)


ITSELF = "; the process that trains plans its saves itself, which delays its steps"
BROKEN = {
    "no interpreter": ("executable", "/no/python", "No such file or directory: '/no/python'"),
    "cannot import": ("_START", "raise SystemExit(3)", r"has ended \(exit code 3\)"),
    "prints at its start": ("_START", "print('hello')", ""),
    "hangs at its start": ("_START", "input()", "has not started within 0 s"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_start_is_said_once(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, value, said = BROKEN[case]
    monkeypatch.setattr(plan_cache, "MANY", 1)
    monkeypatch.setattr(planning_process, "_PATIENCE", 0.3 if case.startswith("hangs") else 60)
    monkeypatch.setattr(sys if name == "executable" else planning_process, name, value)
    cache = PlanCache(background=True)
    for _ in range(2):
        cache.choose(1)
        assert type(cache.planning) is Planning
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(said + ITSELF, record.getMessage())


def test_small_saves_and_those_that_training_waits_for_start_none() -> None:
    for cache, chunks in ((PlanCache(background=True), plan_cache.MANY - 1), (PlanCache(), 10 * plan_cache.MANY)):
        cache.choose(chunks)
        assert type(cache.planning) is Planning
