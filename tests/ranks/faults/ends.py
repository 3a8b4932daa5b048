"""One rank ends, or is stopped."""

from __future__ import annotations

from faulting import PLACES, train

from faults.fault import GONE, Elsewhere, Fault, Subject

__all__ = ["ENDS"]

ENDS = Subject("One rank ends", by_place=True)

WAYS = {
    "raise": "`raise ValueError`",
    "kill": "`kill -9`, or killed for lack of memory",
    "sys.exit": "`sys.exit()`",
    "os._exit": "`os._exit()`, or a crash in C++",
    "out of memory": "no memory for a tensor",
    "SIGTERM": "SIGTERM without `checkpoint.on_signal`",
    "stop": "SIGSTOP, or a machine that hangs",
}
_WHERE = {
    "init": "between `init` and `prepare`",
    "optimizer": "`prepare`, building the optimizer",
    "group": "`prepare`, the first collective",
    "prepare": "`prepare`, sending the model",
} | {place: f"`engine.{place}`" for place in ("forward", "backward", "step", "save", "load")}
_RAISED = {
    "raise": "ValueError: a broken sample",
    "out of memory": "RuntimeError: ...can't allocate memory: you tried to allocate...",
}


def _row(kind: str, place: str, victim: int) -> Fault:
    other = 1 - victim
    if kind in _RAISED and place == "save":  # each rank raises it
        outcome = f"unishard: rank ... of 2 raised CheckpointError: rank {victim}: {_RAISED[kind]}..."
    elif kind in _RAISED:
        outcome = f"unishard: rank {victim} of 2 raised {_RAISED[kind]}..."
    elif kind == "sys.exit" and place == "save":
        outcome = f"unishard: rank {other} of 2 raised CheckpointError: rank {victim}: interrupted by SystemExit..."
    else:
        why = {"sys.exit": "has ...left ...", "stop": "has not answered for 6 s: its process is stopped..."}
        outcome = f"unishard: rank {other} of 2 ...rank {victim} {why.get(kind, GONE)}"
    saved = {"save": "step-00000012", "load": "step-00000013"}.get(
        place, "step-00000012" if place in PLACES[3:] else ""
    )
    lines = 2 if kind in (*_RAISED, "stop") else 1
    return Fault(WAYS[kind], _WHERE[place], outcome, train, (place, kind, victim), saved, lines)


ENDS.rows += [
    Fault(
        WAYS["raise"],
        f"between `dataloader` and `prepare`, rank {victim}",
        f"unishard: rank {victim} of 2 raised ValueError: a broken sample...",
        train,
        ("before prepare", "raise", victim),
    )
    for victim in range(2)
]
# Another place and another rank from one kind to the next, so that the first ones span all.
for turn in range(len(PLACES)):
    ENDS.rows += [
        _row(kind, PLACES[(number + turn) % len(PLACES)], (number + turn) % 2) for number, kind in enumerate(WAYS)
    ]
ENDS.rows += [_row("stop", "group", 1), _row("kill", "group", 0)]
ENDS.rows.append(
    Elsewhere(
        "`kill -9`",
        "`engine.step`, under `unishard launch` with `launch.max_restarts`",
        "All ranks are started again, resume from the newest checkpoint, and have the losses of an uninterrupted run.",
        "tests/ranks/test_launching.py::test_a_killed_rank_is_started_anew_and_the_losses_go_on",
    )
)
ENDS.rows.append(
    Elsewhere(
        "`kill -9` of the launcher",
        "any time (`unishard launch`), or after `prepare` (`torchrun`)",
        "unishard: rank ... of 2 ends because its launcher (process ...) is gone. With `checkpoint.on_signal` the "
        "ranks save first.",
        "tests/ranks/test_two_runs.py::test_ranks_end_when_their_launcher_is_killed_and_the_next_start_goes_on",
    )
)
ENDS.rows.append(
    Elsewhere(
        "`kill -9` of one rank or of both",
        "every moment of `engine.save`, also in the background (`make crash`)",
        "The former checkpoint or the new one is there, complete; the next save clears what was left.",
        "tests/ranks/test_crashes.py::test_a_kill_at_any_moment_loses_the_save_that_was_cut_off_at_most",
    )
)
