"""Kills ranks and launchers of `unishard launch` with SIGKILL at random, and starts them again: `make kill N=60`.

A run trains in one directory of checkpoints, on either engine, in one life after another. In each phase of a life a
rank, all ranks or the launcher is killed. torchrun's agent starts killed ranks anew; after the end of a launcher the
next one starts at once, beside what is left. After each kill the newest checkpoint must be sound and no older than
before, and so must be the newest copy of one in another directory; the processes that save must take turns, nothing is
left of files of offload, which half of the lives have, and the first line of the output must be the cause.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import typer

from dev.ranks.judging import WARNING, problems_of, until
from unishard.checkpoint import finding, manifest
from unishard.distributed.processes import started
from unishard.testing.cells import BACKENDS

WORLD = 2
SCRIPT = Path(__file__).with_name("trained_for_ever.py")
"""What the ranks run."""
VICTIMS = ("rank 0", "rank 1", "all ranks", "launcher")
_FAILED = "the save in the background failed: "
_GONE = (
    rf"(unishard: rank \d of 2 .*|{_FAILED})rank {{}} is gone: .*"
    r"|unishard launch: (rank {} was killed by SIGKILL.*|starts all ranks anew .*)"
)
CAUSES = {
    "rank 0": _GONE.format(0, 0),
    "rank 1": _GONE.format(1, 1),
    "all ranks": _GONE.format(r"\d", r"\d"),
    "launcher": r"unishard: rank \d of 2 (saves and ends|ends|ended .*) because its launcher \(process \d+\) is gone",
}
"""The first line after a kill, if there is one: of ranks that have not met yet, the launcher speaks only when it gives
up."""


class Run:
    """A run in a folder, and the launcher of its present life."""

    def __init__(self, folder: Path, choice: random.Random) -> None:
        self.root, self.log = folder / "runs", folder / "log"
        self.copies, self.files = folder / "copies", folder / "files"
        self.files.mkdir()
        self._folder, self._choice, self._lives = folder, choice, 0
        self.log.touch()
        self.start()

    def start(self) -> None:
        """Start a launcher, with other settings than the last one."""
        self._lives += 1
        self.output = self._folder / f"output{self._lives}"
        self.saves_on_signal = self._lives % 3 == 0
        facts = {
            "backend": BACKENDS[self._lives % 2],
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
            "offload": {"params": "nvme", "optimizer": "nvme", "nvme_path": str(self.files)}
            if self._choice.random() < 0.5
            else {},
            "training": {"micro_batch_size": 2},
            "launch": {"processes_per_node": WORLD, "max_restarts": 1000},
            "checkpoint": {
                "dir": str(self.root),
                "on_existing": "resume",
                "every_steps": 2,
                "keep_last": 2,
                "copy_to": self.copies.as_uri(),
                "async_save": self._choice.random() < 0.5,
                "on_signal": ["SIGTERM"] if self.saves_on_signal else [],
            },
        }
        config = self._folder / f"config{self._lives}.yaml"
        config.write_text(json.dumps(facts))
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        with self.output.open("wb") as file:
            words = ["-m", "unishard", "launch", "--no-check", str(config), str(SCRIPT), str(self.log)]
            self.launcher = subprocess.Popen([sys.executable, *words], env=environment, stdout=file, stderr=file)

    def ranks(self) -> list[tuple[int, str]]:
        """The processes of its ranks, and when they were started."""
        try:
            children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
            found = [int(pid) for pid in children if SCRIPT.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:
            return []
        return [(pid, started(pid)) for pid in found if started(pid)]

    def events(self) -> list[dict[str, Any]]:
        """What rank 0 has written in all lives."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def newest(self, root: Path) -> tuple[int, int, list[str]]:
        """Commit and step of the newest checkpoint in a directory, and what is wrong with it."""
        found = finding.latest(root)
        if found is None:
            return 0, 0, []
        facts = manifest.read(found)
        return facts.commit, facts.step, problems_of(found)

    def end(self) -> None:
        """End everything."""
        ranks = self.ranks()
        self.launcher.kill()
        self.launcher.wait()
        for pid, when in ranks:
            if started(pid) == when:
                os.kill(pid, signal.SIGKILL)


class Kill(NamedTuple):
    """One kill, and what came of it."""

    phase: str
    """Of the life that it ended: the last event of its rank 0, or how far the launcher was."""
    victim: str
    wrong: list[str]
    when: float
    cause: float | None = None
    """Seconds until the first line of the cause was there; None where nobody wrote one."""


def play(run: Run, choice: random.Random) -> Kill:
    """Kill once."""
    _await_moment(run, choice)
    if run.launcher.poll() is not None:
        said, code = run.output.read_text(errors="replace").splitlines(), run.launcher.returncode
        run.start()
        wrong = [f"the launcher has ended by itself with {code}: {said[:3]}"]
        return Kill("nothing was killed", "launcher", wrong, time.time())
    ranks, events = run.ranks(), run.events()
    victim = choice.choice(VICTIMS) if len(ranks) == WORLD else "launcher"
    last = "ranks start" if ranks else "launcher starts"
    if events and events[-1]["pid"] in dict(ranks):
        last = events[-1]["event"]
    before = {root: run.newest(root) for root in (run.root, run.copies)}
    size, output = run.output.stat().st_size, run.output
    order = sorted(ranks, key=lambda each: b"RANK=0" not in Path(f"/proc/{each[0]}/environ").read_bytes().split(b"\0"))
    victims = {"all ranks": order, "launcher": [(run.launcher.pid, "")]}.get(victim) or [order[int(victim[-1])]]
    when, cause = time.time(), None

    def told() -> list[str]:
        said = output.read_bytes()[size:].decode(errors="replace").splitlines()
        return [line for line in said if not WARNING.fullmatch(line)]

    def over() -> bool:
        nonlocal cause
        if cause is None and told():
            cause = time.time() - when
        return not any(begun == started(pid) for pid, begun in ranks)

    for pid, _ in victims:
        os.kill(pid, signal.SIGKILL)
    if victim == "launcher":
        run.launcher.wait()
        run.start()
    wrong = []
    if not until(over, 60):
        wrong.append(f"ranks {[pid for pid, begun in ranks if begun == started(pid)]} live on")
    until(lambda: over() and cause is not None, 5)  # where ranks had no time for it, the launcher says it
    for root, (commit, step, _) in before.items():
        found = _sound(run, root)
        if found[2] or found[0] < commit:
            wrong.append(
                f"the newest checkpoint in {root.name} is number {found[0]} of step {found[1]} instead of {commit} of "
                f"{step}; damaged: {found[2]}"
            )
    if left := [each.name for each in run.files.iterdir()]:
        wrong.append(f"files of offload are left: {left}")
    savers = [event["pid"] for event in run.events() if event["event"] == "saving"]
    if len(_turns(savers)) != len(set(savers)):
        wrong.append(f"processes that save do not take turns: {_turns(savers)}")
    if (lines := told()) and not re.fullmatch(CAUSES[victim], lines[0]):
        wrong.append(f"the first line is {lines[0]!r}")
    return Kill(last, victim, wrong, when, cause)


def _await_moment(run: Run, choice: random.Random) -> None:
    """Wait for a random moment in a random phase of this life."""
    phase, events = choice.choice(("any", "prepare", "training", "saving")), len(run.events())
    if phase == "any":
        time.sleep(choice.uniform(0, 8))
        return
    wanted, longest = {"prepare": ("prepare", 2.0), "training": ("step", 1.0), "saving": ("saving", 0.05)}[phase]
    until(
        lambda: any(event["event"] == wanted for event in run.events()[events:]) or run.launcher.poll() is not None, 90
    )
    time.sleep(choice.uniform(0, longest))


def _sound(run: Run, root: Path) -> tuple[int, int, list[str]]:
    """The newest checkpoint; looked at again where the next life has just replaced it."""
    for _ in range(3):
        try:
            found = run.newest(root)
        except Exception as error:  # whatever it is, the next life could not resume
            found = (-1, -1, [f"{type(error).__name__}: {error}"])
        if not found[2]:
            break
    return found


def _turns(savers: list[int]) -> list[int]:
    return [pid for number, pid in enumerate(savers) if number == 0 or savers[number - 1] != pid]


def main() -> int:
    """Kill so many times, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kills", type=int, nargs="?", default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the figures into docs/integrity.md")
    asked = parser.parse_args()
    choice, begin, kills = random.Random(asked.seed), time.monotonic(), list[Kill]()
    with tempfile.TemporaryDirectory(prefix="killing-", dir="/var/tmp") as folder:
        run = Run(Path(folder), choice)
        try:
            for number in range(1, asked.kills + 1):
                kills.append(kill := play(run, choice))
                typer.echo(
                    f"{number}: {kill.victim} in phase {kill.phase!r}: {'; '.join(kill.wrong) or 'well'} "
                    f"({time.monotonic() - begin:.0f} s)"
                )
            until(lambda: _went_on(run.events(), kills[-1].when), 120)
        finally:
            run.end()
        events = run.events()
    lives, lost, faults = (
        len({event["pid"] for event in events}),
        _lost(events),
        sum(bool(kill.wrong) for kill in kills),
    )
    for (phase, victim), number in sorted(Counter((kill.phase, kill.victim) for kill in kills).items()):
        typer.echo(f"{phase}, {victim}: {number}")
    for line in lost:
        typer.echo(f"LOST: {line}")
    typer.echo(
        f"{asked.kills} kills in {lives} lives, {faults} wrong, {len(lost)} lost, in {time.monotonic() - begin:.0f} s"
    )
    if asked.record:
        from dev.integrity.figures import killed
        from dev.integrity.page import record

        record("runs", killed([_figures(kill, events) for kill in kills]))
    return int(bool(faults or lost))


def _figures(kill: Kill, events: list[dict[str, Any]]) -> dict[str, Any]:
    """A kill with the updates that it cost, and the seconds until the next new update."""
    resumed = next((each for each in events if each["event"] == "resumed" and each["time"] > kill.when), None)
    return kill._asdict() | {"lost": _updates_lost(kill, events, resumed), "again": _went_on(events, kill.when)}


def _updates_lost(kill: Kill, events: list[dict[str, Any]], resumed: dict[str, Any] | None) -> int:
    """Those that were made since the checkpoint that the next life resumed from; none where nothing was trained."""
    if resumed is None or kill.phase not in ("resumed", "step", "saving"):
        return 0
    before = [each["step"] for each in events[: events.index(resumed)] if each["event"] in ("resumed", "step")]
    return int(before[-1] - resumed["step"])


def _went_on(events: list[dict[str, Any]], when: float) -> float | None:
    """Seconds from a moment to the first update of the life that resumed after it."""
    later = [each for each in events if each["time"] > when]
    resumed = next((number for number, each in enumerate(later) if each["event"] == "resumed"), len(later))
    return next((each["time"] - when for each in later[resumed:] if each["event"] == "step"), None)


def _lost(events: list[dict[str, Any]]) -> list[str]:
    """Lives that resumed from an older checkpoint than the one before: a save is complete at the latest when the next
    one begins, or in the background, for which the next one waits after it has begun, when the next but one does.
    """
    found, complete = [], 0
    saves: list[int] = []
    for event in events:
        if event["event"] == "resumed":
            if event["step"] < complete:
                found.append(f"process {event['pid']} resumed from step {event['step']}, and step {complete} was saved")
            saves = []
        elif event["event"] == "saving":
            saves.append(event["step"])
            complete = max([complete, *saves[: -2 if event["in_background"] else -1]])
    return found


if __name__ == "__main__":
    sys.exit(main())
