"""The tables of docs/integrity.md on kills, damaged files and lost updates, from what the programs have recorded.

`make integrity` runs the programs, each of which records its part; `python -m dev.integrity.page` writes the page
anew from dev/integrity/measured.json and measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dev.integrity.figures import PARTS, PHASES, Json, causes
from dev.pages.marked import replace
from dev.pages.rows import DOCS, rows

BEGIN, END = "<!-- integrity: written by dev/integrity -->", "<!-- end of integrity -->"
RECORD, PAGE = Path(__file__).with_name("measured.json"), DOCS / "integrity.md"


def record(part: str, figures: Json) -> None:
    """Keep the figures of one program, and write the page."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept[part] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), **figures}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    write()


def write() -> None:
    """Write the tables."""
    replace(PAGE, BEGIN, END, section(json.loads(RECORD.read_text()), rows("reliability.md")))


def section(kept: Json, page: Iterable[tuple[str, Sequence[str]]]) -> str:
    """The generated part of the page."""
    lines: list[str] = []
    if "saves" in kept:
        lines += _saves(kept["saves"])
    if "runs" in kept:
        lines += ["", *_runs(kept["runs"])]
    if "files" in kept:
        lines += ["", *_files(kept["files"])]
    return "\n".join([*lines, "", *_causes(causes(page))]).strip("\n")


def _saves(found: Json) -> Iterator[str]:
    parts = found["parts"]
    points, wrong = (sum(each[name] for each in parts.values()) for name in ("points", "wrong"))
    yield (
        f"**Kills in a save** ({found['date']}): {points} saves cut off, {wrong} with another outcome than the former or "
        f"the new checkpoint, complete. All ranks had ended {found['slowest']:.1f} s after the start of the save at the "
        f"latest. In {found['full']} more saves the disk ran full; {found['full wrong']} ended otherwise."
    )
    yield ""
    yield "| killed at | saves | the former is the newest | the new one is | neither, or damaged |"
    yield "|---|---|---|---|---|"
    for name, said in PARTS.items():
        if (each := parts.get(name)) is None:
            continue
        former = each["points"] - each["new"] - each["wrong"]
        yield f"| {said} | {each['points']} | {former} | {each['new']} | {each['wrong']} |"


def _runs(found: Json) -> Iterator[str]:
    wrong = sum(each["wrong"] for each in found["phases"].values())
    yield (
        f"**Kills of a run** ({found['date']}): {found['kills']} kills of a rank, all ranks or the launcher in runs that "
        f"save after every second update, some lives in the background; {wrong} after which a checkpoint that was "
        "complete was gone, a rank lived on, or another line than the cause came first."
    )
    yield ""
    yield "| killed in | kills | wrong | updates lost, at most | seconds to the cause | seconds to the next update |"
    yield "|---|---|---|---|---|---|"
    for name, said in PHASES.items():
        if (each := found["phases"].get(name)) is None:
            continue
        cells = [said, *(str(each[key]) for key in ("kills", "wrong", "lost"))]
        yield f"| {' | '.join([*cells, _seconds(each['cause']), _seconds(each['again'])])} |"


def _files(found: Json) -> Iterator[str]:
    yield f"**Damaged files** ({found['date']}): each file of a checkpoint of 2 ranks."
    yield ""
    yield "| engine | damage | files | times | not found | seconds until `load` refuses |"
    yield "|---|---|---|---|---|---|"
    for each in found["tries"].values():
        harm = {"truncate": "cut to a part of its length", "flip": "one bit flipped"}[each["harm"]]
        counted = " | ".join(str(each[name]) for name in ("files", "tries", "missed"))
        yield f"| {each['engine']} | {harm} | {counted} | {_seconds(each['seconds'], 3)} |"


def _causes(found: Json) -> Iterator[str]:
    yield "**Seconds to the cause**: of the faults of [reliability.md](reliability.md), by `make faults`."
    yield ""
    yield "| fault | runs | fastest | median | longest |"
    yield "|---|---|---|---|---|"
    for kind, each in found.items():
        yield f"| {kind} | {each['runs']} | {' | '.join(f'{seconds:.1f}' for seconds in each['seconds'])} |"


def _seconds(values: Sequence[float], digits: int = 1) -> str:
    return "" if not values else f"{values[0]:.{digits}f}, at most {values[1]:.{digits}f}"


if __name__ == "__main__":
    write()
