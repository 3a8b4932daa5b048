"""What the programs of `make integrity` keep of what came of their kills and damage."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dev.measured import Json

PARTS = {
    "directory": "making the new directory",
    "tensors": "tensors",
    "index": "the index",
    "assets": "config and other files",
    "manifest": "the manifest",
    "replacing": "moving one of the same step away",
    "name": "giving it its name",
    "latest": "naming it as the newest",
    "deleting": "deleting older ones",
    "root": "the directory of checkpoints",
    "talking": "messages between the ranks",
    "the end": "when the save has returned",
}
"""Of a save, in its order; as `dev.ranks.interception` calls them, and on the page."""
PHASES = {
    "launcher starts": "the launcher starts",
    "ranks start": "ranks start",
    "prepare": "`prepare`",
    "resumed": "after resuming",
    "step": "updates",
    "saving": "a save",
}
"""Of a life, as `killing.py` calls them, and on the page."""
_ENDS = "One rank ends"


def cut_off(played: Iterable[tuple[str, bool, bool]], slowest: float, full: Sequence[bool]) -> Json:
    """Of `crashing.py`.

    Args:
        played: Of each point the part of a save, whether the new checkpoint was there, and whether all was well.
        slowest: Seconds until the ranks of a save that was cut off had ended, from its start.
        full: Of each moment at which a disk ran full, whether all was well.
    """
    parts: dict[str, Counter[str]] = {}
    for where, new, well in played:
        counted = parts.setdefault(where if where in PARTS else "talking", Counter())
        counted.update({"points": 1, "new": int(new), "wrong": int(not well)})
    return {
        "parts": {name: dict(counted) for name, counted in parts.items()},
        "slowest": slowest,
        "full": len(full),
        "full wrong": full.count(False),
    }


def killed(kills: Sequence[Json]) -> Json:
    """Of `killing.py`: each kill's phase, whether all was well, updates lost, seconds to the cause and to an update."""
    phases = {}
    for phase in PHASES:
        found = [each for each in kills if each["phase"] == phase]
        if found:
            phases[phase] = {
                "kills": len(found),
                "wrong": sum(bool(each["wrong"]) for each in found),
                "lost": max(each["lost"] for each in found),
                **{name: _middle_and_most(each[name] for each in found) for name in ("cause", "again")},
            }
    return {"phases": phases, "kills": len(kills)}


def damaged_files(outcomes: Mapping[str, Sequence[Any]]) -> Json:
    """Of `damaging.py`: outcomes by engine."""
    found = {}
    for backend, of in outcomes.items():
        for harm in ("truncate", "flip"):
            these = [each for each in of if each.harm == harm]
            found[f"{backend} {harm}"] = {
                "engine": backend,
                "harm": harm,
                "files": len({each.file for each in these}),
                "tries": len({(each.file, each.how) for each in these}),
                "missed": len({(each.file, each.how) for each in these if not each.found}),
                "seconds": _middle_and_most(each.seconds for each in these),
            }
    return {"tries": found}


def causes(page: Iterable[tuple[str, Sequence[str]]]) -> Json:
    """Of `make faults`: the seconds in the last column of the page by kind of fault."""
    kinds: dict[str, list[float]] = {}
    for heading, cells in page:
        if len(cells) == 5 and cells[-1]:
            kind = cells[0] if heading == _ENDS else heading.lower()
            kinds.setdefault(kind, []).extend(map(float, cells[-1].split(" / ")))
    return {kind: {"runs": len(of), "seconds": [min(of), *_middle_and_most(of)]} for kind, of in kinds.items()}


def _middle_and_most(values: Iterable[float | None]) -> list[float]:
    """Median and largest; empty where there is none."""
    known = [each for each in values if each is not None]
    return [statistics.median(known), max(known)] if known else []
