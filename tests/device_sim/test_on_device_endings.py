"""How a run on the device ends: an error of one rank, and a signal to one rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cells import BACKENDS, races
from harness import checked, config, my_rank, own_share, prepare, train

import unishard
from unishard.checkpoint import finding
from unishard.testing import run_ranks


def fails_alone(backend: str) -> tuple[str, str]:
    try:
        with prepare(checked(backend)) as engine:
            (batch,) = own_share(1)
            train(engine, [batch])
            if my_rank() == 1:
                raise ValueError("a broken sample")
            engine(**batch)
    except ValueError as error:
        time.sleep(1)  # it need not end for the others to learn of it
        return "ValueError", str(error)
    except unishard.UnishardError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_one_rank_is_told_to_the_others(backend):
    other, own = run_ranks(2, fails_alone, backend, timeout=200)
    assert own == ("ValueError", "a broken sample")
    assert other[0] == "RankMismatchError"
    assert "rank 1 raised ValueError: a broken sample" in other[1]
    assert "rank 0 is in engine.forward (update 2" in other[1]


def interrupted(backend: str, root: str) -> tuple[object, list[str]]:
    """Rank 1 gets the signal that a batch system sends before it ends a job."""
    cfg = config(backend, checkpoint={"dir": root, "on_signal": ["USR1"]})
    try:
        with prepare(cfg) as engine:
            for at, batch in enumerate(engine.batches(own_share(9))):
                engine.backward(engine(**batch).loss)
                if at == 3 and my_rank() == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                engine.step()
    except SystemExit as end:
        return end.code, races()
    return "it went on", races()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signal_to_one_rank_saves_at_the_end_of_the_update_and_ends_all(backend, tmp_path):
    assert run_ranks(2, interrupted, backend, str(tmp_path), timeout=200) == [(85, [])] * 2
    assert [found.step for found in finding.checkpoints(Path(tmp_path))] == [4]
