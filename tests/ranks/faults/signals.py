"""SIGTERM, as a scheduler sends it before it ends a job, at any time."""

from __future__ import annotations

from faulting import terminated

from faults.fault import Elsewhere, Fault, Subject

__all__ = ["SIGNALS"]

SIGNALS = Subject("Signals")

_SAVED = "All ranks end the update, save it, and end with exit code 85."
SIGNALS.rows += [
    Fault(
        f"SIGTERM to rank {number % 2} with `checkpoint.on_signal: [TERM]`",
        place if place.startswith("between") else f"`engine.{place}`",
        _SAVED,
        terminated,
        (place, number % 2),
        kept="step-00000013",
        lines=0,
        code=85,
    )
    for number, place in enumerate(("between calls", "forward", "backward", "step", "save", "load"))
]
SIGNALS.rows.append(
    Elsewhere(
        "SIGTERM or SIGINT to one rank, and again after a second",
        "a collective in which another rank is missing",
        "unishard: rank 0 of 2 was stuck in engine.mean (...), and was ended by a second SIGTERM",
        "tests/ranks/test_faults.py::test_the_second_signal_ends_a_rank_that_is_stuck_in_a_collective",
    )
)
SIGNALS.rows.append(
    Elsewhere(
        "SIGINT to one rank",
        "`engine.save`",
        "The save ends on all ranks, and leaves nothing; every rank ends.",
        "tests/ranks/test_checkpoint_goes_on.py::test_an_interrupt_on_one_rank_ends_the_save_on_all_and_leaves_nothing",
    )
)
SIGNALS.rows.append(
    Elsewhere(
        "SIGINT or SIGUSR1 to `unishard launch`",
        "any time",
        "It ends all ranks, or passes the signal on, and its exit status says so.",
        "tests/ranks/test_launching.py::test_ctrl_c_ends_every_rank",
    )
)
