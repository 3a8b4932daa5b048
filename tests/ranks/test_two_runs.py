"""Two live runs in one directory of checkpoints, and ranks whose launcher is killed: what users see, and what is
left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import launched_training
import pytest
import torch.distributed as dist
from forking import in_a_fork
from harness import BACKENDS, config, in_ranks, own_share, prepare, problems_of, refused, steps, train, until

from unishard.checkpoint import finding, lease, manifest
from unishard.distributed.processes import machine, started
from unishard.testing import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(not machine(), reason="needs /proc")]
NODE = {"owner": "b" * 16, "run": "1f3a9c2e", "host": "node7", "since": "noon"}


def lay(root: Path, **said: object) -> None:
    """Put another run's lease in place of what is there."""
    file = root / lease.FILE
    file.unlink(missing_ok=True)
    file.touch()
    facts = {**NODE, "machine": machine(), "file": file.stat().st_ino, **said}
    file.write_text(json.dumps(facts) + f"\n{0:020}\n")


@in_ranks
def test_a_second_live_run_and_one_whose_directory_was_taken_are_one_error_each(root):
    """On both engines: runs that come to a directory of a living run, and one whose directory is taken."""
    lease.GRACE, pid = 0.5, os.getppid()
    who = f"run 1f3a9c2e (process {pid} on node7, since noon)"
    for backend, existing, background in product(BACKENDS, ("resume", "new"), (False, True)):
        folder = Path(root, f"{backend}-{existing}-{background}")
        checkpoint = {"dir": str(folder), "on_existing": existing, "every_steps": 1, "async_save": background}
        cfg = config(backend, "no_shard", checkpoint=checkpoint)
        with prepare(cfg) as engine:
            train(engine, own_share(2))
            engine.wait()
            _on_first(lay, folder, pid=pid, started=started(pid))
            theirs = folder / f".tmp-step-00000003-{'b' * 32}"
            _on_first(theirs.mkdir)
            before = sorted(os.listdir(folder))
            taken = refused(train, engine, own_share(1))
            if background and taken == "nothing":
                taken = refused(engine.wait)
        assert taken.startswith("CheckpointError: ")
        assert f"{who} has taken over this directory" in taken
        began = refused(_begin, cfg)
        assert began.startswith("CheckpointError: ")
        assert f"{who} saves here and is still alive" in began
        assert sorted(os.listdir(folder)) == before


def _begin(cfg: object) -> None:
    with prepare(cfg) as engine:
        train(engine, own_share(1))


def _on_first(act, *arguments, **named) -> None:
    if dist.get_rank() == 0:
        act(*arguments, **named)
    dist.barrier()


def together(root: str) -> tuple[str, int]:
    """A run that starts while another one does."""
    lease.GRACE = 0.5
    cfg = config("fsdp", "no_shard", checkpoint={"dir": root, "on_existing": "new", "every_steps": 1, "keep_last": 2})
    with prepare(cfg) as engine:
        told = refused(train, engine, own_share(6))
        time.sleep(1.5 if told == "nothing" else 0)
    return told, os.getpid()


def test_of_two_runs_that_start_together_one_goes_on(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_ranks, 2, together, str(tmp_path)) for _ in range(2)]
        outcomes = [[told for told, _ in run.result()] for run in runs]
    winner, loser = sorted(outcomes, key=lambda told: told[0] != "nothing")
    assert winner == ["nothing"] * 2
    assert loser[0] == loser[1]
    assert "saves here and is still alive" in loser[0]
    assert steps(tmp_path) == [5, 6]
    assert len({manifest.read(found.path).run for found in finding.checkpoints(tmp_path)}) == 1


# -- a launcher that is killed --


def start(folder: Path, output: Path, program: tuple[str, ...] = ("unishard", "launch", "c.yaml")) -> subprocess.Popen:
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *program, launched_training.__file__, "losses", "--end=-1:0:slow"],
            cwd=folder,
            env=os.environ | {"UNISHARD_CONFIG": "c.yaml"},
            stdout=file,
            stderr=file,
        )


def ranks_of(launcher: subprocess.Popen) -> list[tuple[int, str]]:
    """A launcher starts each rank in a session of its own."""
    found = map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split())
    return [(pid, started(pid)) for pid in found if os.getsid(pid) == pid]


def lives(folder: Path) -> int:
    return (folder / "losses").read_text().count("\n") if (folder / "losses").exists() else 0


def killed_and_started_again(folder: Path, more: dict[str, tuple[str, ...]]) -> tuple[int, int, int]:
    """The number of the launcher that is killed, how the second one ends, and the step that was saved between them."""
    first = start(folder, folder / "first", **more)
    assert until(lambda: lives(folder) >= 3)
    ranks = ranks_of(first)
    assert len(ranks) == 2
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert until(lambda: not any(when == started(pid) for pid, when in ranks), 20)
    saved = finding.latest(folder / "runs")
    assert problems_of(saved) == []
    step = manifest.read(saved).step
    return first.pid, start(folder, folder / "second", **more).wait(60), step


@pytest.mark.parametrize("kind", ["launch, on_signal", "torchrun"])
def test_ranks_end_when_their_launcher_is_killed_and_the_next_start_goes_on(kind, tmp_path):
    signals = ["SIGTERM"] if "on_signal" in kind else []
    every = 1000 if signals else 2
    checkpoint = {"dir": "runs", "on_existing": "resume", "every_steps": every, "keep_last": 2, "on_signal": signals}
    facts = {"optimizer": {"name": "sgd", "lr": 0.1}, "launch": {"processes_per_node": 2}, "checkpoint": checkpoint}
    (tmp_path / "c.yaml").write_text(json.dumps(facts))
    program = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2") if kind == "torchrun" else None
    more = {"program": program} if program else {}
    launcher, code, saved_step = in_a_fork(killed_and_started_again, tmp_path, more)
    said = [line for line in (tmp_path / "first").read_text().splitlines() if line.startswith("unishard: ")]
    cause = f"because its launcher (process {launcher}) is gone"
    assert re.fullmatch(
        rf"unishard: rank \d of 2 {'saves and ends' if signals else 'ends'} {re.escape(cause)}", said[0]
    )
    assert all(cause in line for line in said), "each rank names it"
    assert code == 0, (tmp_path / "second").read_text()
    made = [json.loads(line)[2] for line in (tmp_path / "losses").read_text().splitlines()]
    assert made[-1] == 8
    if signals:
        kept = [step for step in range(1, 9) if step != saved_step]
        assert made == kept, "none is made twice; one ended in its save"
    assert len({manifest.read(found.path).run for found in finding.checkpoints(tmp_path / "runs")}) == 1
