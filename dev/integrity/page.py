"""The tables of docs/integrity.md on kills, damaged files and lost updates, from what the programs have recorded.

`make integrity` runs the programs, each of which records its part; `python -m dev.integrity.page` writes the page
anew from what is kept and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from dev.integrity.figures import PARTS, PHASES, causes
from dev.measured import Json, Measured
from dev.pages.markdown import table
from dev.pages.rows import rows


def record(part: str, figures: Json) -> None:
    """Keep the figures of one program, and write the page."""
    MEASURED.keep(MEASURED.kept() | {part: {"date": datetime.now(UTC).strftime("%Y-%m-%d"), **figures}})


def section(kept: Json) -> str:
    """The generated part of the page: what is kept, and the seconds of docs/reliability.md."""
    parts = {"saves": _saves, "runs": _runs, "files": _files}
    blocks = [block for name, said in parts.items() if name in kept for block in said(kept[name])]
    return "\n\n".join([*blocks, *_causes(causes(rows("reliability.md")))])


def _saves(found: Json) -> Iterator[str]:
    parts = found["parts"]
    points, wrong = (sum(each[name] for each in parts.values()) for name in ("points", "wrong"))
    yield (
        f"**Kills in a save** ({found['date']}): {points} saves cut off, {wrong} with another outcome than the former or "
        f"the new checkpoint, complete. All ranks had ended {found['slowest']:.1f} s after the start of the save at the "
        f"latest. In {found['full']} more saves the disk ran full; {found['full wrong']} ended otherwise."
    )
    yield table(
        ("killed at", "saves", "the former is the newest", "the new one is", "neither, or damaged"),
        (_saved(said, parts[name]) for name, said in PARTS.items() if name in parts),
    )


def _saved(said: str, part: Json) -> tuple[str, ...]:
    former = part["points"] - part["new"] - part["wrong"]
    return said, *map(str, (part["points"], former, part["new"], part["wrong"]))


def _runs(found: Json) -> Iterator[str]:
    wrong = sum(each["wrong"] for each in found["phases"].values())
    yield (
        f"**Kills of a run** ({found['date']}): {found['kills']} kills of a rank, all ranks or the launcher in runs that "
        f"save after every second update, some lives in the background; {wrong} after which a checkpoint that was "
        "complete was gone, a rank lived on, or another line than the cause came first."
    )
    yield table(
        ("killed in", "kills", "wrong", "updates lost, at most", "seconds to the cause", "seconds to the next update"),
        (_killed(said, found["phases"][name]) for name, said in PHASES.items() if name in found["phases"]),
    )


def _killed(said: str, phase: Json) -> tuple[str, ...]:
    counted = (str(phase[key]) for key in ("kills", "wrong", "lost"))
    return said, *counted, _seconds(phase["cause"]), _seconds(phase["again"])


def _files(found: Json) -> Iterator[str]:
    yield f"**Damaged files** ({found['date']}): each file of a checkpoint of 2 ranks."
    yield table(
        ("engine", "damage", "files", "times", "not found", "seconds until `load` refuses"),
        map(_damaged, found["tries"].values()),
    )


def _damaged(tries: Json) -> tuple[str, ...]:
    harm = {"truncate": "cut to a part of its length", "flip": "one bit flipped"}[tries["harm"]]
    counted = (str(tries[name]) for name in ("files", "tries", "missed"))
    return tries["engine"], harm, *counted, _seconds(tries["seconds"], 3)


def _causes(found: Json) -> Iterator[str]:
    yield "**Seconds to the cause**: of the faults of [reliability.md](reliability.md), by `make faults`."
    yield table(
        ("fault", "runs", "fastest", "median", "longest"),
        ((kind, str(each["runs"]), *(f"{seconds:.1f}" for seconds in each["seconds"])) for kind, each in found.items()),
    )


def _seconds(values: Sequence[float], digits: int = 1) -> str:
    return "" if not values else f"{values[0]:.{digits}f}, at most {values[1]:.{digits}f}"


MEASURED = Measured("integrity", "dev/integrity/measured.json", {"docs/integrity.md": section})

if __name__ == "__main__":
    MEASURED.keep(MEASURED.kept())
