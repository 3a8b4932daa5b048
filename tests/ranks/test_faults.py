"""Whatever one rank does, all end within seconds, the first line of the output is the cause, and the others write one
line.

`make faults` plays every fault on both engines; here are some that span them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import DEEP

from dev.faults.ending import signalled
from dev.faults.fault import BOUND, ROWS, spanning
from dev.faults.own_way import branch
from dev.faults.page import timed
from dev.faults.played import ELSEWHERE, ENDS, PLAYED, WAYS
from dev.pages.rows import DOCS
from dev.ranks.scripts import endings
from unishard.testing.cells import BACKENDS

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
BRANCHES = [(branch, (backend, first, False)) for backend, first in zip(BACKENDS, (2, 13), strict=True)]
ABORT = (branch, ("fsdp", 13, True))
STUCK = [(signalled, ("fsdp", "SIGINT", ())), (signalled, ("deepspeed", "SIGTERM", ("SIGTERM",)))]
SECTIONS = list(dict.fromkeys(row.section for row in ROWS.values()))
REPEATED = {
    "an error whose `__str__` raises",
    "an exception group",
    "`if rank == 0: engine.save(folder)`",
    "`if rank == 0: torch.distributed.barrier()`",
    "another `clip_grad_norm` on each rank",
    "two engines, updated in another order on each rank",
    "a loss of NaN on rank 1",
    "an infinite loss on rank 1 with `training.nonfinite: raise`",
    "the disk becomes read-only",
    "the folder of checkpoints vanished",
}
"""Faults like others here, or that test_desync.py and test_windows.py have."""
HERE = [fault for fault in PLAYED if fault.short and (DEEP or fault.what not in REPEATED)]
SPANNING = [
    run
    for section in SECTIONS
    for run in spanning([fault for fault in HERE if fault.row.section == section], by_place=section == SECTIONS[0])
]
RUNS = tuple(dict.fromkeys([*(fault.run(backend) for fault, backend in SPANNING), *BRANCHES, ABORT, *STUCK]))


def ending(run):
    """How a run ended; all of them are run together."""
    found = endings(RUNS)[run]
    assert 0 <= found.seconds < BOUND, found
    assert not any(code.startswith("Hung") for code in found.codes.values()), found
    return found


def name(run) -> str:
    fault, backend = run
    words = [getattr(argument, "__name__", str(argument)) for argument in fault.arguments]
    return "-".join((fault.scenario.__name__, *words, backend))


@pytest.mark.parametrize("run", SPANNING, ids=name)
def test_a_fault_ends_as_the_page_says(run):
    fault, backend = run
    found = ending(fault.run(backend))
    assert not fault.wrong(found), {key: str(value)[:2000] for key, value in found._asdict().items()}
    assert sum(map(len, found.lines)) < 20_000, "a text of megabytes is cut"
    assert all(len(message) < 10_000 for message in found.recorded.values()), "also in the file that torchrun shows"
    if fault in ENDS:
        _, kind, victim = fault.arguments
        assert f"rank {victim}" in found.recorded[1 - victim], "what torchrun shows of the other rank names this one"
        assert kind != "raise" or found.recorded[victim].endswith("ValueError: a broken sample")
    if "different calls" in fault.row.outcome and fault.lines == 2:
        assert len(found.lines) == 2, found
        assert re.fullmatch(r"unishard: rank \d of 2 ended for the same reason as rank \d", found.lines[1])
        assert all("ranks made different calls" in message for message in found.recorded.values()), found


def test_the_runs_span_every_fault_every_place_and_both_engines():
    assert {fault.what for fault, _ in SPANNING} == {fault.what for fault in HERE}
    assert {fault.what for fault in PLAYED} >= REPEATED
    for section in SECTIONS:
        assert {backend for fault, backend in SPANNING if fault.row.section == section} == {*BACKENDS}
    assert {fault.where for fault, _ in SPANNING if fault in ENDS} == {fault.where for fault in ENDS}
    assert {fault.what for fault in ENDS} == {*WAYS.values()}


def written_of_branches(run):
    return "-".join(map(str, run[1]))


@pytest.mark.parametrize("run", BRANCHES, ids=written_of_branches)
def test_ranks_in_other_branches_are_told_of_conditional_modules(run):
    found = ending(run)
    assert len(found.lines) == 2, found
    update = run[1][1]
    for rank, module in enumerate(("left", "right")):
        assert (
            f"rank {rank} enters {module} (Expert) and is in engine.forward (update {update}, micro-batch 1 of 1)"
            in found.lines[0]
        )
    assert "except those of the classes in sharding.conditional_modules: add Expert there" in found.lines[0]


def test_a_rank_that_gloo_aborts_in_another_branch_leaves_a_hint():
    found = ending(ABORT)
    assert found.lines[-1].endswith("it ran other modules than this rank: see sharding.conditional_modules"), found


@pytest.mark.parametrize("run", STUCK, ids=written_of_branches)
def test_the_second_signal_ends_a_rank_that_is_stuck_in_a_collective(run):
    found = ending(run)
    stuck = f"was stuck in engine.mean (update 1, micro-batch 1 of 1), and was ended by a second {run[1][1]}"
    assert found.lines == [
        f"unishard: rank 0 of 2 {stuck}",
        f"unishard: rank 1 of 2 ended in engine.mean (update 1, micro-batch 1 of 1) because rank 0 {stuck}",
    ]
    assert (
        found.codes[0]
        == f"Died: the process ended with exit code {128 + {'SIGINT': 2, 'SIGTERM': 15}[run[1][1]]} before it answered"
    )


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", dict.fromkeys(ELSEWHERE.values()))
def test_the_test_of_a_fault_that_is_tested_elsewhere_exists(test):
    file, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text()


def test_every_row_of_the_page_is_tested():
    played = {(fault.what, fault.where) for fault in PLAYED}
    assert {*ROWS} == played | {row for row in ROWS if row[0] in ELSEWHERE}
    assert len(ROWS) == len(PLAYED) + len(ELSEWHERE)


def test_times_stand_in_the_last_column():
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert timed(page, dict.fromkeys(((fault, backend) for fault in PLAYED for backend in BACKENDS), 1.25)).count(
        " | 1.2 / 1.2 |"
    ) == len(PLAYED)


def test_a_fault_whose_outcome_is_another_is_told():
    fault, backend = SPANNING[0]
    good = endings(RUNS)[fault.run(backend)]
    assert not fault.wrong(good)
    assert "not the cause" in fault.wrong(good._replace(lines=["[rank0]: no", *good.lines]))
    assert "too long" in fault.wrong(good._replace(seconds=BOUND))
    assert "checkpoint" in fault.wrong(good._replace(kept="step-00000001"))
    assert "hangs" in fault.wrong(good._replace(codes={0: "Hung: no answer"}))
