"""Kills ranks with SIGKILL at every moment of a save, and looks at what is left: `make crash`.

Each point is a real save of 2 ranks to a directory that holds complete checkpoints already, cut off just before, after
or in the middle of one thing that a rank does: opening, writing and syncing a file, making, renaming and deleting, and
talking to the other rank. The points are counted in a save that is not disturbed, so none is left out. Fresh processes
then examine what a resumed run would find, and save again. Then it lets the disk of a rank run full at every such
moment.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import typer

from dev.integrity.cutting_off import Point, count, cut_off, examine, note_of
from dev.integrity.full_disk import Outcome, fill
from dev.integrity.small_saves import SCENARIOS, WORLD, prepare
from unishard.testing import RankFailure, run_ranks

MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
"""Where a sync costs nothing; what a killed process has written stays there too."""
GRACE = 10.0
"""Seconds in which a rank must notice that another one is gone."""
_BATCH = 40
"""Roots that the same fresh processes examine."""


class Played(NamedTuple):
    """A point, and what came of it."""

    point: Point
    problem: str
    """What was not as it should be; empty if nothing."""
    new: bool
    """Whether the new checkpoint is there, not the former one alone."""


class Harness:
    """Plays points in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.templates = {scenario: str(folder / f"template {index}") for index, scenario in enumerate(SCENARIOS)}
        run_ranks(WORLD, prepare, self.templates)
        copies = {scenario: shutil.copytree(root, f"{root} copied") for scenario, root in self.templates.items()}
        self._events = run_ranks(WORLD, count, copies)
        self._folder = folder
        self.slowest = 0.0
        """Seconds from the start of a save to the end of its last rank, of the slowest one."""

    def points(self) -> list[Point]:
        """Every one: each rank alone, and both at once when either of them is there."""
        found = []
        for index, scenario in enumerate(SCENARIOS):
            for rank in range(WORLD):
                events = [*self._events[rank][index], None]
                for victims in ((rank,), (1 - rank, rank)):
                    found += [Point(scenario, victims, at, event) for at, event in enumerate(events)]
        return found

    def play(self, points: Sequence[Point], advance: Callable[[], None] = lambda: None) -> list[Played]:
        """Cut off a save at each point."""
        played: list[Played] = []
        for begin in range(0, len(points), _BATCH):
            batch, roots, endings = points[begin : begin + _BATCH], [], []
            for index, point in enumerate(batch):
                root = shutil.copytree(self.templates[point.scenario], self._folder / f"point {begin + index}")
                problem, promised = self._cut_off(root, point)
                endings.append(problem)
                roots.append((str(root), point.scenario, promised))
                advance()
            lefts = run_ranks(WORLD, examine, roots, timeout=600)[0]
            for point, problem, left in zip(batch, endings, lefts, strict=True):
                played.append(Played(point, "; ".join(filter(None, (problem, left.wrong))), left.new))
            for root, *_ in roots:
                shutil.rmtree(root)
        return played

    def fill(self, stride: int) -> list[Outcome]:
        """Let the disk of one rank run full at every so many moments."""
        templates = {
            scenario: root for scenario, root in self.templates.items() if not scenario.background and not scenario.left
        }
        everyones = run_ranks(WORLD, fill, templates, stride, timeout=600)
        return [outcome for outcomes in everyones for outcome in outcomes]

    def _cut_off(self, root: Path, point: Point) -> tuple[str, bool]:
        """What was wrong with how the ranks ended, and whether one of them was told that its save is complete."""
        begin = time.monotonic()
        try:
            run_ranks(WORLD, cut_off, str(root), point, timeout=60, grace=GRACE)
        except RankFailure as failure:
            self.slowest = max(self.slowest, time.monotonic() - begin)
            notes = [note for rank in range(WORLD) if (note := note_of(str(root), rank)).exists()]
            for note in notes:
                note.unlink()
            return _ended_wrong(failure, point), bool(notes)
        return "nobody was killed", True


def _ended_wrong(failure: RankFailure, point: Point) -> str:
    """Victims die of the signal, and the others of an error of their own, in time."""
    for rank, error in failure.errors.items():
        killed = error.type == "Died" and "SIGKILL" in error.message
        if killed is not (rank in point.victims) or error.type == "Hung":
            return f"rank {rank} ended with {error.type}: {error.message}"
    return f"ranks {failure.finished} went on" if failure.finished else ""


def spanning(points: Sequence[Point], number: int) -> list[Point]:
    """So many points, evenly spread over the parts of a checkpoint, what is done to them, the scenarios and the
    victims."""
    chosen: dict[Point, None] = {}
    worn: Counter[object] = Counter()
    while len(chosen) < min(number, len(points)):
        rest = [point for point in points if point not in chosen]
        best = min(
            rest, key=lambda point: (worn[point.where], worn[point.kind], worn[point.scenario] + worn[point.victims])
        )
        chosen[best] = None
        worn.update([best.where, best.kind, best.scenario, best.victims])
    return list(chosen)


def main() -> int:
    """Play all points, print how many there were of each kind, and which did harm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--points",
        type=int,
        default=None,
        metavar="N",
        help="play so many of them, spread over all kinds; default: all",
    )
    parser.add_argument("--record", action="store_true", help="write the figures into docs/integrity.md")
    given = parser.parse_args()
    asked = given.points
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crashing-", dir=MEMORY) as folder:
        harness = Harness(Path(folder))
        points = harness.points() if asked is None else spanning(harness.points(), asked)
        with typer.progressbar(length=len(points), label="points") as bar:
            played = harness.play(points, lambda: bar.update(1))
        outcomes = harness.fill(stride=1 if asked is None else 5)
    for kind, number in Counter(point.kind for point in points).items():
        typer.echo(f"{number:5}  {kind}")
    lost = [each for each in played if each.problem]
    for point, problem, _ in lost:
        typer.echo(f"LOST: {point.scenario.name}, ranks {point.victims} at event {point.at} ({point.kind}): {problem}")
    typer.echo(
        f"{len(points)} points, {len(lost)} lost, in {time.monotonic() - begin:.0f} s; the ranks of a run that was cut "
        f"off had all ended {harness.slowest:.1f} s after its start at the latest"
    )
    wrong = [outcome for outcome in outcomes if outcome.fault]
    for outcome in wrong:
        typer.echo(
            f"WRONG: {outcome.scenario}, the disk of rank {outcome.rank} was full at {', '.join(outcome.event)}: "
            f"{outcome.fault}"
        )
    typer.echo(f"{len(outcomes)} moments at which a disk ran full, {len(wrong)} wrong")
    if given.record:
        from dev.integrity.figures import cut_off
        from dev.integrity.page import record

        full = [not outcome.fault for outcome in outcomes]
        record(
            "saves", cut_off([(each.point.where, each.new, not each.problem) for each in played], harness.slowest, full)
        )
    return int(bool(lost or wrong))


if __name__ == "__main__":
    sys.exit(main())
