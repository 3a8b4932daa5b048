"""What plays the faults of docs/reliability.md, and the tests of those that need one of their own."""

from __future__ import annotations

import math

from dev.faults import ending, failing, own_way
from dev.faults.fault import Fault

__all__ = ["ELSEWHERE", "ENDS", "PLAYED", "WAYS"]

WAYS = {
    "raise": "`raise ValueError`",
    "kill": "`kill -9`, or killed for lack of memory",
    "sys.exit": "`sys.exit()`",
    "os._exit": "`os._exit()`, or a crash in C++",
    "out of memory": "no memory for a tensor",
    "SIGTERM": "SIGTERM without `checkpoint.on_signal`",
    "stop": "SIGSTOP",
}
_WHERE = {
    "init": "between `init` and `prepare`",
    "optimizer": "`prepare`, building the optimizer",
    "group": "`prepare`, the first collective",
    "prepare": "`prepare`, sending the model",
} | {place: f"`engine.{place}`" for place in ("forward", "backward", "step", "save", "load")}


def _end(kind: str, place: str, victim: int) -> Fault:
    lines = 2 if kind in ("raise", "out of memory", "stop") else 1
    return Fault(WAYS[kind], _WHERE[place], ending.train, (place, kind, victim), lines)


_BEFORE = "between `dataloader` and `prepare`, rank {}"
ENDS = [
    *(Fault(WAYS["raise"], _BEFORE.format(rank), ending.train, ("before prepare", "raise", rank)) for rank in (0, 1)),
    # Another place and another rank from one kind to the next, so that the first ones span all.
    *(
        _end(kind, ending.PLACES[(number + turn) % len(ending.PLACES)], (number + turn) % 2)
        for turn in range(len(ending.PLACES))
        for number, kind in enumerate(WAYS)
    ),
    _end("stop", "group", 1),
    _end("kill", "group", 0),
]

_UPDATE, _INSIDE, _SAVE = "update 13", "inside `with engine:`", "`engine.save`"
_LATE = "`raise ValueError`, and a `finally` around `with engine:` that takes longer than the other rank lives"
_SKIPS = "a `continue` on rank 1 skips `engine.backward` inside an accumulation window"
_SLOW = "the disk of rank 1 takes longer than `communication.desync_timeout`"
_FOLDER = "the folder of checkpoints vanish"
_SIGNAL = "SIGTERM to rank {} with `checkpoint.on_signal: [TERM]`"
_SIGNALLED = ("between calls", "forward", "backward", "step", "save", "load")

PLAYED = [
    *ENDS,
    Fault(_LATE, _INSIDE, ending.leave, ("short",)),
    Fault("an error with a text of 30 MB", _INSIDE, ending.leave, ("long", False)),
    Fault("an error whose `__str__` raises", _INSIDE, ending.leave, ("unreadable", False)),
    Fault("an exception group", _INSIDE, ending.leave, ("group", False)),
    Fault("`kill -9` in a save in the background", "between calls", ending.die_in_the_background, (), lines=1),
    *(
        Fault(
            _SIGNAL.format(number % 2),
            place if number == 0 else f"`engine.{place}`",
            ending.train,
            (place, "SIGTERM, to save", number % 2),
        )
        for number, place in enumerate(_SIGNALLED)
    ),
    Fault("`if rank == 0: engine.mean(loss)`", _UPDATE, own_way.misuse, (own_way.mean_alone,)),
    Fault("`if rank == 0: engine.save(folder)`", _UPDATE, own_way.misuse, (own_way.save_alone,)),
    Fault("`if rank == 1: engine.export(folder)`", _UPDATE, own_way.misuse, (own_way.wait_alone,)),
    Fault("`if rank == 0: torch.distributed.barrier()`", _UPDATE, own_way.misuse, (own_way.barrier_alone,)),
    Fault("`torch.distributed.recv` on both ranks", _UPDATE, own_way.misuse, (own_way.receive_on_both,)),
    Fault("another `clip_grad_norm` on each rank", _UPDATE, own_way.misuse, (own_way.other_clip,)),
    Fault("two engines, updated in another order on each rank", _UPDATE, own_way.misuse, (own_way.other_order,)),
    Fault(
        "rank 1 skips a batch in its own loop",
        "noticed at the end of its loop",
        own_way.misuse,
        (own_way.skip_a_batch,),
        lines=1,
    ),
    Fault(_SKIPS, "`engine.batches`", failing.reading, ("skips one",)),
    Fault("a shorter list on rank 1", "`engine.batches`, at once", failing.reading, ("a list",), short=False),
    Fault("a shorter stream on rank 1", "`engine.batches`, when it ends", failing.reading, ("a stream",), short=False),
    Fault("another model on rank 1", "`prepare`", failing.other_model, (), short=False),
    Fault("a loss of NaN on rank 1", "one update", failing.not_a_number, ("skip", math.nan)),
    Fault(
        "an infinite loss on rank 1 with `training.nonfinite: raise`",
        "one update",
        failing.not_a_number,
        ("raise", math.inf),
    ),
    Fault("`MASTER_PORT` is in use by another program", "`prepare`", failing.port_in_use, ()),
    Fault("the disk of rank 1 is full", _SAVE, failing.disk, ("full", 1)),
    Fault("the disk of rank 1 is broken", _SAVE, failing.disk, ("broken", 1), short=False),
    Fault("the disk becomes read-only", f"{_SAVE}, creating the checkpoint", failing.disk, ("read-only", 0)),
    Fault(f"{_FOLDER}es", f"{_SAVE}, writing tensors", failing.disk, ("vanishes", 1)),
    Fault(f"{_FOLDER}ed", "between two saves", failing.disk, ("vanished before", 0)),
    Fault(_SLOW, _SAVE, failing.disk, ("slow", 1)),
]

_RANKS = "tests/ranks/test_"
_RUNS = f"{_RANKS}two_runs.py::test_a_second_live_run_and_one_whose_directory_was_taken_are_one_error_each"
ELSEWHERE = {
    "`kill -9`": f"{_RANKS}launching.py::test_a_killed_rank_is_started_anew_and_the_losses_go_on",
    "`kill -9` of the launcher": f"{_RANKS}two_runs.py::"
    "test_ranks_end_when_their_launcher_is_killed_and_the_next_start_goes_on",
    "`kill -9` of one rank or of both": f"{_RANKS}crashes.py::"
    "test_a_kill_at_any_moment_loses_the_save_that_was_cut_off_at_most",
    "SIGTERM or SIGINT to one rank, and again after a second": f"{_RANKS}faults.py::"
    "test_the_second_signal_ends_a_rank_that_is_stuck_in_a_collective",
    "SIGINT to one rank": f"{_RANKS}checkpoint_goes_on.py::"
    "test_an_interrupt_on_one_rank_ends_the_save_on_all_and_leaves_nothing",
    "SIGINT or SIGUSR1 to `unishard launch`": f"{_RANKS}launching.py::test_ctrl_c_ends_every_rank",
    "rank 1 takes another branch of the model": f"{_RANKS}faults.py::"
    "test_ranks_in_other_branches_are_told_of_conditional_modules",
    "another live run saves in the same `checkpoint.dir`": _RUNS,
    "the run was stopped for over a minute, and another one has taken `checkpoint.dir`": _RUNS,
    "the disk of one rank runs full": f"{_RANKS}crashes.py::"
    "test_a_disk_that_runs_full_at_any_moment_is_told_and_keeps_what_was_there",
    "a file of the newest checkpoint is truncated, or has a flipped bit": f"{_RANKS}crashes.py::"
    "test_every_file_that_is_truncated_or_has_a_flipped_bit_is_named_and_refused",
    "the disk fails": f"{_RANKS}checkpoint_goes_on.py::"
    "test_a_failure_in_the_background_is_raised_once_everywhere_and_logged_at_once",
    "`checkpoint.dir` on a disk of each node": f"{_RANKS}mistakes.py::"
    "test_a_mistake_is_one_clear_error_on_every_rank_or_does_no_harm",
}
"""By fault, the test that plays it."""
