"""The disk of one rank fails."""

from __future__ import annotations

from faulting import disk

from faults.fault import Elsewhere, Fault, Subject

__all__ = ["DISKS"]

DISKS = Subject("Disks")

_CANNOT = "unishard: rank ... of 2 raised CheckpointError: ...rank 1 could not write its shards: "
_BEFORE = "step-00000012"
DISKS.rows += [
    Fault(
        "the disk of rank 1 is full",
        "`engine.save`",
        _CANNOT + "...No space left on device...",
        disk,
        ("full", 1),
        _BEFORE,
    ),
    Fault(
        "the disk of rank 1 is broken",
        "`engine.save`",
        _CANNOT + "...Input/output error...",
        disk,
        ("broken", 1),
        _BEFORE,
        short=False,
    ),
    Fault(
        "the disk becomes read-only",
        "`engine.save`, creating the checkpoint",
        "unishard: rank ... of 2 raised CheckpointError: ...cannot create a checkpoint here (Read-only file system); "
        "choose a writable folder...",
        disk,
        ("read-only", 0),
        _BEFORE,
    ),
    Fault(
        "the folder of checkpoints vanishes",
        "`engine.save`, writing tensors",
        "unishard: rank ... of 2 raised CheckpointError: ...could not write its shards: ...No such file or directory...",  # of the first
        disk,
        ("vanishes", 1),
    ),
    Fault(
        "the folder of checkpoints vanished",
        "between two saves",
        "The next save creates it again, and training goes on.",
        disk,
        ("vanished before", 0),
        kept="step-00000013",
        lines=0,
        code=0,
    ),
    Fault(
        "the disk of rank 1 takes longer than `communication.desync_timeout`",
        "`engine.save`",
        "The other ranks wait, and training goes on.",
        disk,
        ("slow", 1),
        kept="step-00000013",
        lines=0,
        code=0,
    ),
    Elsewhere(
        "another live run saves in the same `checkpoint.dir`",
        "`prepare` with `on_existing: resume`, the first update, or the first save",
        "CheckpointError on all ranks of the second run: ...: run ... (process ... on ..., since ...) saves here and "
        "is still alive...",
        "tests/ranks/test_two_runs.py::test_a_second_live_run_and_one_whose_directory_was_taken_are_one_error_each",
    ),
    Elsewhere(
        "the run was stopped for over a minute, and another one has taken `checkpoint.dir`",
        "the next `engine.save`",
        "CheckpointError on all ranks: ...: run ... has taken over this directory...; nothing of the other run is "
        "deleted.",
        "tests/ranks/test_two_runs.py::test_a_second_live_run_and_one_whose_directory_was_taken_are_one_error_each",
    ),
    Elsewhere(
        "the disk of one rank runs full",
        "every moment of `engine.save` (`make crash`)",
        "CheckpointError: ...No space left on device...; the former checkpoint stays, and the next save succeeds once "
        "there is room.",
        "tests/ranks/test_crashes.py::test_a_disk_that_runs_full_at_any_moment_is_told_and_keeps_what_was_there",
    ),
    Elsewhere(
        "a file of the newest checkpoint is truncated, or has a flipped bit",
        "`engine.load`",
        "CheckpointError: the file is named, and nothing was changed.",
        "tests/ranks/test_crashes.py::test_every_file_that_is_truncated_or_has_a_flipped_bit_is_named_and_refused",
    ),
    Elsewhere(
        "the disk fails",
        "a save in the background",
        "CheckpointError on all ranks at the next call; logged at once.",
        "tests/ranks/test_checkpoint_goes_on.py::test_a_failure_in_the_background_is_raised_once_everywhere_and_logged_at_once",
    ),
    Elsewhere(
        "`checkpoint.dir` on a disk of each node",
        "`engine.save`",
        "CheckpointError: ...: not the same folder on all ranks: rank 1 on ... cannot read what rank 0 on ... wrote "
        "there...",
        "tests/ranks/test_mistakes.py::test_a_mistake_is_one_clear_error_on_every_rank_or_does_no_harm",
    ),
]
