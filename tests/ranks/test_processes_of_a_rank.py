"""Processes that a rank starts: a worker that is killed is the cause that all name, and a fork ends alone."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import pytest
import torch
from harness import BACKENDS, checked, my_rank, own_share, update

import unishard
from dev.ranks.scripts import endings, started
from unishard.testing.models import MODELS

pytestmark = pytest.mark.ranks


class Samples(torch.utils.data.Dataset):
    """Micro-batches, of which the third ends its worker a second later."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return own_share(1)[0]


def loses_a_worker(folder: str, backend: str) -> None:
    """A worker of rank 0 is killed while rank 0 waits for rank 1."""
    with unishard.prepare(MODELS["mlp"].build(), checked(backend)) as engine:
        batches = [own_share(1)[0]] * 6
        if my_rank() == 0:
            batches = torch.utils.data.DataLoader(
                Samples(), batch_size=None, num_workers=1, multiprocessing_context="fork"
            )
        for number, batch in enumerate(batches):
            if number == 1 and my_rank() == 1:
                started(folder)
                time.sleep(3.0)
            update(engine, batch)


def forks(folder: str, backend: str, victim: int) -> None:
    """A child of a rank leaves with `sys.exit`, and training goes on."""
    child = 0
    with unishard.prepare(MODELS["mlp"].build(), checked(backend)) as engine:
        for number, batch in enumerate(own_share(16)):
            if number == 12 and my_rank() == victim:
                started(folder)
                child = os.fork()
                if child == 0:
                    sys.exit(3)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            update(engine, batch)
        engine.mean(1.0)


LOSES = [(loses_a_worker, (backend,)) for backend in BACKENDS]
FORKS = [(forks, (backend, rank)) for rank, backend in enumerate(BACKENDS)]
RUNS = (*LOSES, *FORKS)


@pytest.mark.parametrize("run", LOSES, ids=BACKENDS)
def test_a_worker_that_is_killed_is_the_first_thing_said(run):
    found = endings(RUNS)[run]
    seen_first = r"\(pid \d+\) is killed by signal: Killed", r"\(pid\(s\) \d+\) exited unexpectedly"  # by torch
    killed = f"raised RuntimeError: DataLoader worker ({'|'.join(seen_first)})"
    assert re.match(f"unishard: rank 0 of 2 {killed}", found.lines[0]), found.lines
    assert re.match(f"unishard: rank 1 of 2 ended .*because rank 0 {killed}", found.lines[-1]), found.lines


@pytest.mark.parametrize("run", FORKS, ids=BACKENDS)
def test_a_fork_that_leaves_ends_alone(run):
    found = endings(RUNS)[run]
    assert found.lines == []
    assert all("exit code 0" in said for said in found.codes.values()), found.codes
