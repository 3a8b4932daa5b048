"""An error of one rank that is hard to write, or that others hear of before its process ends."""

from __future__ import annotations

from faulting import die_in_the_background, leave

from faults.fault import Fault, Subject

__all__ = ["ERRORS"]

ERRORS = Subject("One rank has an error that is hard to write")

_RAISED = "unishard: rank 1 of 2 raised "
_INSIDE = "inside `with engine:`"
ERRORS.rows += [
    Fault(
        "`raise ValueError`, and a `finally` around `with engine:` that takes longer than the other rank lives",
        _INSIDE,
        "unishard: rank 0 of 2 ...: rank 1 raised ValueError: a broken sample (...) and has closed the engine; rank 0 "
        "is in ...",
        leave,
        ("short",),
    ),
    Fault(
        "an error with a text of 30 MB", _INSIDE, _RAISED + "ValueError: a broken sample 000...", leave, ("long", False)
    ),
    Fault(
        "an error whose `__str__` raises",
        _INSIDE,
        _RAISED + "Unreadable: no text, since its __str__ raises KeyError (...)",
        leave,
        ("unreadable", False),
    ),
    Fault(
        "an exception group",
        _INSIDE,
        _RAISED + "ExceptionGroup: two samples (2 sub-exceptions) (...): ValueError: a broken sample",
        leave,
        ("group", False),
    ),
    Fault(
        "`kill -9` in a save in the background",
        "between calls",
        "the save in the background failed: rank 1 is gone: its process ended without an error...",
        die_in_the_background,
        (),
        "step-00000012",
        1,
    ),
]
