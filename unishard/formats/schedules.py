"""Schedules of which a document does not say the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unishard.contract.entries import Entry, KeyEffect, Path, Undecided
from unishard.contract.rules import Fit

__all__ = ["open_end"]

_TOTAL = "scheduler.total_steps"


def open_end(entries: Iterable[Entry], path: Path) -> Iterator[Entry]:
    """The end of a schedule that falls, where no entry decides it, so that the schedule is not refused for lack of it.

    Args:
        entries: What the document says.
        path: Of the key that would say it.
    """
    fields = {field: value for entry in entries for field, value in entry.effect.fields.items()}
    if fields.get("scheduler.name") in ("linear", "cosine") and _TOTAL not in fields:
        who = Undecided(f"{'.'.join(path)}, which the file does not have in steps")
        yield Entry(
            path, None, KeyEffect(Fit.NEEDS_INPUT, f"the value comes from {who.who}", {_TOTAL: who}), assumed=True
        )
