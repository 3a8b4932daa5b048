"""Whatever one rank does, all end within seconds, the first line of the output is the cause, and the others write one line."""

from __future__ import annotations

import re

import pytest
from faulting import (
    Ending,
    barrier_alone,
    branch,
    endings,
    mean_alone,
    misuse,
    other_clip,
    other_order,
    save_alone,
    signalled,
    train,
)

from unishard.testing.cells import BACKENDS

pytestmark = pytest.mark.ranks

BOUND = 20.0
"""Seconds from the fault to the end of the last rank; most take less than 3 on an idle machine, those that need the watchdog 7."""

ANYWHERE = [("before prepare", "raise", 0), ("before prepare", "raise", 1), ("init", "kill", 1)]
INSIDE = [
    ("optimizer", "exit", 1),
    ("prepare", "kill", 0),
    ("prepare", "raise", 1),
    ("forward", "raise", 0),
    ("backward", "kill", 1),
    ("step", "exit", 1),
    ("save", "raise", 1),
]
FAULTS = [(train, (place, kind, BACKENDS[victim], victim)) for place, kind, victim in ANYWHERE]
FAULTS += [(train, (place, kind, backend, victim)) for place, kind, victim in INSIDE for backend in BACKENDS]

FORWARD = "rank 1 is in engine.forward (update 13, micro-batch 1 of 1"
MISUSE = {
    mean_alone: ("rank 0 is in engine.mean (update 13", FORWARD),
    save_alone: ("rank 0 is in engine.save (update 13", FORWARD),
    barrier_alone: ("rank 0 waits in torch.distributed at faulting.py", "in barrier_alone, outside unishard", FORWARD),
    other_clip: ("rank 0 is in engine.step (update 13, micro-batch 1 of 1, clip_grad_norm=1.0)", "clip_grad_norm=2.0)"),
    other_order: ("rank 0 is in engine 1.forward (update 13", "rank 1 is in engine 2.forward (update 13"),
}
MISUSES = [(misuse, (act, backend)) for act in MISUSE for backend in BACKENDS]
BRANCHES = [(branch, (backend, first, False)) for backend in BACKENDS for first in (2, 13)]
ABORT = (branch, ("fsdp", 13, True))
SIGNALS = [(signalled, ("fsdp", "SIGINT", ())), (signalled, ("deepspeed", "SIGTERM", ("SIGTERM",)))]


def ending(run: tuple) -> Ending:
    """How a run ended; all of them are run together."""
    found = endings((*FAULTS, *MISUSES, *BRANCHES, ABORT, *SIGNALS))[run]
    assert 0 <= found.seconds < BOUND, found
    assert not any(code.startswith("Hung") for code in found.codes.values()), found
    return found


def name(run: tuple) -> str:
    return "-".join(str(getattr(argument, "__name__", argument)) for argument in run[1])


@pytest.mark.parametrize("run", FAULTS, ids=name)
def test_a_rank_that_ends_is_named_in_the_first_line_and_ends_the_others(run):
    place, kind, _, victim = run[1]
    found, other = ending(run), 1 - victim
    if place == "save":  # an error that every rank has
        cause = r"unishard: rank \d of 2 raised CheckpointError: rank 1: ValueError: a broken sample \(.*"
    elif kind == "raise":
        cause = rf"unishard: rank {victim} of 2 raised ValueError: a broken sample.*"
    else:
        why = {"kill": "is gone: its process ended without an error", "exit": "(has ended its program|has left unishard.prepare)"}[kind]
        cause = rf"unishard: rank {other} of 2 .*rank {victim} {why}.*"
    assert re.fullmatch(cause, found.lines[0]), found
    assert len([line for line in found.lines if line.startswith("unishard: ")]) == (2 if kind == "raise" else 1), found
    traced = [rank for rank in range(2) if any(line.startswith(f"[rank{rank}]:") for line in found.lines)]
    assert len(traced) == (kind == "raise" and place != "before prepare"), found
    assert not any("gloo/" in line or "Connection closed" in line for line in found.lines), found
    assert f"rank {victim}" in found.recorded[other], "what torchrun shows of the other rank names this one"
    assert kind != "raise" or found.recorded[victim].endswith("ValueError: a broken sample")


@pytest.mark.parametrize("run", MISUSES, ids=name)
def test_other_calls_of_one_rank_in_any_update_are_one_error_on_all(run):
    found = ending(run)
    assert len(found.lines) == 2, found
    for part in ("(RankMismatchError.*|was stopped): ranks made different calls", *map(re.escape, MISUSE[run[1][0]])):
        assert re.search(part, found.lines[0]), found
    assert re.fullmatch(r"unishard: rank \d of 2 ended for the same reason as rank \d", found.lines[1])
    assert set(found.codes.values()) == {"Died: the process ended with exit code 1 before it answered"}
    assert all("ranks made different calls" in message for message in found.recorded.values()), found


@pytest.mark.parametrize("run", BRANCHES, ids=name)
def test_ranks_in_other_branches_are_told_of_conditional_modules(run):
    found = ending(run)
    assert len(found.lines) == 2, found
    update = run[1][1]
    for rank, module in enumerate(("left", "right")):
        assert f"rank {rank} enters {module} (Expert) and is in engine.forward (update {update}, micro-batch 1 of 1)" in found.lines[0]
    assert "except those of the classes in sharding.conditional_modules: add Expert there" in found.lines[0]


def test_a_rank_that_gloo_aborts_in_another_branch_leaves_a_hint():
    found = ending(ABORT)
    assert found.lines[-1].endswith("it ran other modules than right (Expert): see sharding.conditional_modules"), found


@pytest.mark.parametrize("run", SIGNALS, ids=name)
def test_the_second_signal_ends_a_rank_that_is_stuck_in_a_collective(run):
    found = ending(run)
    stuck = f"was stuck in engine.mean (update 1, micro-batch 1 of 1), and was ended by a second {run[1][1]}"
    assert found.lines == [
        f"unishard: rank 0 of 2 {stuck}",
        f"unishard: rank 1 of 2 ended in engine.mean (update 1, micro-batch 1 of 1) because rank 0 {stuck}",
    ]
    assert found.codes[0] == f"Died: the process ended with exit code {128 + {'SIGINT': 2, 'SIGTERM': 15}[run[1][1]]} before it answered"
