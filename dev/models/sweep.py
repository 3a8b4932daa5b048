"""Plays every case in pairs of ranks, and keeps what came of each run in a file of JSON lines: `make models`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dev.models import CASES
from dev.models.chunked import play_chunked
from dev.models.joint import play_joint, runs_with_experts, runs_with_sequence, runs_with_tensor
from dev.models.page import environment, environment_of, page
from dev.models.playing import play
from dev.models.rows import COLUMNS, column_of, read, rows_of, write, write_column
from dev.models.runs import WORLD, runs_of
from unishard.testing import RankFailure, run_ranks

__all__ = ["attempt", "played", "played_jointly"]

Record = dict[str, Any]
_ALL = ("", *COLUMNS)
"""What is played: the runs of the first columns, and those of a column each."""
_TIMEOUT = 600.0
_BESIDE = 2
"""Cases that are played at a time: ranks wait for each other a good part of the time."""
_TOGETHER = 24
"""Cases that share ranks for a column: a start takes longer than they do."""
_JOINT = {"sequence": runs_with_sequence, "experts": runs_with_experts, "tensor": runs_with_tensor}


def played(name: str) -> list[Record]:
    """What came of each run of a case, in order. An error ends the ranks; the runs after it are played by new ones."""
    todo = list(runs_of(list(CASES).index(name)))
    records: list[Record] = []
    with TemporaryDirectory(prefix="models-") as folder:
        while todo:
            found = attempt({name: todo}, folder)[name]
            records += found
            broken = {record["run"] for record in records if "error" in record}
            todo = [run for run in todo[len(found) :] if str(run.source) not in broken]
    return records


def played_jointly(column: str, names: Sequence[str]) -> list[Record]:
    """What came of the runs of some cases for a column. An error ends the ranks; new ones go on."""
    todo = {name: runs for name in names if (runs := _JOINT[column](list(CASES).index(name)))}
    records: list[Record] = []
    with TemporaryDirectory(prefix="models-") as folder:
        while todo:
            found = attempt(todo, folder, play_joint)
            records += [record for of_case in found.values() for record in of_case]
            todo = {name: left for name, runs in todo.items() if (left := runs[len(found[name]) :])}
    return records


def attempt(
    todo: Mapping[str, Sequence[Any]], folder: str, player: Callable[..., None] = play
) -> dict[str, list[Record]]:
    """By case, what came of its runs in one pair of ranks, until one failed."""
    failure = None
    try:
        run_ranks(WORLD, player, todo, folder, timeout=_TIMEOUT, grace=20.0)
    except RankFailure as error:
        failure = error
    found: dict[str, list[Record]] = {name: [] for name in todo}
    for name, runs in todo.items():
        found[name] += _until_failed(name, Path(folder, name), runs, failure)
        if failure is not None and any("error" in record for record in found[name]):
            break
    return found


def _until_failed(name: str, folder: Path, runs: Sequence[Any], failure: RankFailure | None) -> Iterator[Record]:
    ranks = [{record.pop("run"): record for record in _lines(folder / f"rank{rank}.jsonl")} for rank in range(WORLD)]
    for run in runs:
        record = _combined([each.get(str(run)) for each in ranks], failure)
        yield {"case": name, "run": str(run), **record}
        if "error" in record and failure is not None:
            return


def _lines(path: Path) -> Iterator[Record]:
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def _combined(ranks: list[Record | None], failure: RankFailure | None) -> Record:
    """What came of a run, from what came of it on each rank."""
    given = [each for each in ranks if each is not None]
    ended = [each for each in given if "error" in each]
    errors = [each["error"] for each in sorted(ended, key=lambda each: each.get("lost", False))]
    if errors:
        told = len(errors) == WORLD or any(each.get("stops") for each in ended)
        return {"error": errors[0], "ours": told and all(each["ours"] for each in ended)}
    refusals = [each["refused"] for each in given if "refused" in each]
    if 0 < len(refusals) < WORLD:
        return {"error": f"one rank alone refuses: {refusals[0]}", "ours": False}
    if len(given) < WORLD:
        return {"error": _ending(failure), "ours": False}
    if any(each.get("norms") != given[0].get("norms") for each in given):
        return {"error": "the ranks have different gradient norms", "ours": False}
    return given[0]


def _ending(failure: RankFailure | None) -> str:
    """Why a rank wrote nothing: `playing.play` ends it with exit code 1 if it hangs."""
    errors = {} if failure is None else failure.errors
    died = [error.message for error in errors.values() if error.type == "Died" and "exit code 1" not in error.message]
    other = [f"{error.type}: {error.message}" for error in errors.values() if error.type not in ("Died", "Hung")]
    return (died + other + ["hangs"])[0]


def main() -> int:
    """Play the cases and write the table and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where models-tested.csv and models-tested.md are written")
    parser.add_argument(
        "--only", default="", metavar="NAMES", help="play cases whose names contain one of these; other rows stay"
    )
    parser.add_argument(
        "--records", type=Path, default=Path("models-out/records.jsonl"), help="the file of what came of each run"
    )
    parser.add_argument("--resume", action="store_true", help="play only cases that have no records there")
    for column in COLUMNS:
        parser.add_argument(
            f"--{column}",
            action="store_const",
            const=column,
            dest="column",
            help=f"play them only for the column {column}",
        )
    asked = parser.parse_args()
    asked.records.parent.mkdir(parents=True, exist_ok=True)
    if not asked.resume:
        asked.records.write_text("")
    records = list(_lines(asked.records))
    names = [name for name in CASES if any(each.strip() in name for each in asked.only.split(","))]
    begin = time.monotonic()
    for number, found in enumerate(_all(names, records, (asked.column,) if asked.column else _ALL), 1):
        records += found
        with asked.records.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
        sys.stderr.write(f"{time.monotonic() - begin:6.0f} s {number:4} {_line(found)}\n")
    table, text = asked.folder / "models-tested.csv", asked.folder / "models-tested.md"
    said = environment_of(text) if (asked.only or asked.column) and text.exists() else environment()
    if asked.column:
        write_column(table, asked.column, records)
    else:
        write(table, rows_of(records))
    text.write_text(page(read(table), said), encoding="utf-8")
    return 0


def _all(names: Sequence[str], records: Sequence[Record], columns: Collection[str]) -> Iterator[list[Record]]:
    """What comes of cases that have no records, by case."""
    done = {(record["case"], column_of(record)) for record in records}
    todo = {column: [name for name in names if (name, column) not in done] for column in columns}
    with ProcessPoolExecutor(_BESIDE, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(played, name) for name in todo.get("", ())]
        futures += [pool.submit(play_chunked, name) for name in todo.get("chunked", ())]
        futures += [
            pool.submit(played_jointly, column, todo[column][first : first + _TOGETHER])
            for column in _JOINT
            for first in range(0, len(todo.get(column, ())), _TOGETHER)
        ]
        for each in as_completed(futures):
            for _, of_case in groupby(each.result(), itemgetter("case")):
                yield list(of_case)


def _line(records: Sequence[Record]) -> str:
    """The worst of a case, for who watches."""
    if column := column_of(records[0]):
        return f"{records[0]['case']:28} {COLUMNS[column][1](records)[:300]}"
    good = [record for record in records if "losses" in record]
    figures = [
        f"{kind} {max(max(record['losses']) for record in chosen):.0e} "
        f"{max(max(record['norms']) for record in chosen):.0e} {max(record['parameters'] for record in chosen):.0e}"
        for kind in ("fp32", "bf16")
        if (chosen := [record for record in good if f" {kind}" in record["run"]])
    ]
    exports = {record["export"] for record in good if record.get("export")} - {"equal"}
    wrong = [
        f"\n    {record['run']}: {record.get('error') or 'plain torch: ' + record['plain']}"[:300]
        for record in records
        if record not in good
    ]
    return (
        f"{records[0]['case']:28} "
        f"{'; '.join(figures)}{''.join(f'; export: {each}' for each in exports)}{''.join(wrong)}"
    )


if __name__ == "__main__":
    sys.exit(main())
