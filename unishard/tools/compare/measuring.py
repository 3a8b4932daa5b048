"""Runs one candidate on this host, and ends it after its last step."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from unishard.tools.compare.candidates import ComparedRow
from unishard.tools.compare.modules import FILE
from unishard.tools.compare.records import Record, middle, read_records
from unishard.tools.launch.command import Script

_LOOKS = 0.1
"""Seconds between two looks at the records."""
_ENDS = 60.0
"""Seconds that a run has to end after it was asked to."""
_WARM_UP = 3
"""Steps that are not timed: allocations, autotuning, first collectives."""
_RAISED = re.compile(r"^unishard: rank \d+ of \d+ raised (.*)$", re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\[?rank\d+\]?: ?)?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Failure): .*)$", re.MULTILINE
)


class Task(NamedTuple):
    """What is common to all candidates."""

    config: Path
    script: Script
    steps: int
    timeout: float
    """Seconds for one candidate."""
    module_steps: tuple[int, ...] = ()
    """Steps in which each module is measured."""
    rounds: int = 1
    """How often each candidate runs."""


@dataclass(frozen=True)
class Measured:
    """What a candidate has given."""

    candidate: ComparedRow
    records: tuple[Record, ...] = ()
    first_step: float | None = None
    """Seconds from the start of the command until the first step was done."""
    failure: str | None = None
    """Why there are no records, in a line."""
    modules: str = ""
    """The text of `modules.jsonl`."""
    repeats: tuple[tuple[Record, ...], ...] = ()
    """The records of later rounds."""

    @property
    def timed(self) -> tuple[Record, ...]:
        """The records of all rounds without those of the warm-up: 3 steps of each, and at most half of all."""
        return tuple(
            record
            for records in (self.records, *self.repeats)
            for record in records[min(_WARM_UP, len(records) // 2) :]
        )

    def again(self, later: Self) -> Self:
        """This result with another round added; a failure if that round failed."""
        if later.failure:
            return replace(later, failure=f"round {len(self.repeats) + 2}: {later.failure}")
        return replace(self, repeats=(*self.repeats, later.records))

    def median(self, name: str) -> float | None:
        """The median of a value after the warm-up."""
        return middle(self.timed, name)

    @property
    def memory_gib(self) -> float | None:
        """The most that a rank held in any step."""
        records = (record for one_round in (self.records, *self.repeats) for record in one_round)
        return max((record["memory_gib"] for record in records if record.get("memory_gib") is not None), default=None)

    def mfu(self, peak_tflops: float | None = None) -> float | None:
        """Model FLOPs utilization.

        Args:
            peak_tflops: The device's peak in TFLOP/s; None for what the run knows of its device.
        """
        tflops = self.median("tflops")
        return self.median("mfu") if peak_tflops is None or tflops is None else tflops / peak_tflops

    def as_json(self, peak_tflops: float | None = None) -> dict[str, Any]:
        """What a row of the table says."""
        return {
            **self.candidate.as_json(),
            "failure": self.failure,
            "steps": len(self.records),
            "rounds": 1 + len(self.repeats) if self.records else 0,
            "step_seconds": self.median("step_seconds"),
            "tokens_per_second": self.median("tokens_per_second"),
            "samples_per_second": self.median("samples_per_second"),
            "tflops": self.median("tflops"),
            "mfu": self.mfu(peak_tflops),
            "planned_sent_gib": self.median("sent_gib"),
            "memory_gib": self.memory_gib,
            "first_step_seconds": self.first_step,
        }


def in_turns(candidates: int, rounds: int) -> list[tuple[int, int]]:
    """The order of runs, as candidate and round: every second round backward, so that a machine that gets slower is no
    disadvantage.
    """
    order = list(range(candidates))
    return [(at, turn) for turn in range(rounds) for at in (order[::-1] if turn % 2 else order)]


def measure(task: Task, candidate: ComparedRow, overrides: Sequence[str], folder: Path) -> Measured:
    """Run a candidate until it has logged its last step, and end it then: no code of the script after that step is run.

    Args:
        task: What to run.
        candidate: The row.
        overrides: Of the config, which let the run log to `folder`.
        folder: For `log.jsonl`, and `output.txt` with what the ranks write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, output = folder / "log.jsonl", folder / "output.txt"
    for old in (log, folder / FILE):
        old.unlink(missing_ok=True)
    words = [sys.executable, "-m", "unishard", "launch", str(task.config)]
    words += [word for change in overrides for word in ("--set", change)]
    words += [*(["-m"] if task.script.module else []), task.script.name, *task.script.arguments]
    started, first = time.monotonic(), None
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and time.monotonic() - started < task.timeout:
                records = read_records(log)
                first = first or (time.monotonic() - started if records else None)
                if len(records) >= task.steps:
                    break
                time.sleep(_LOOKS)
            code = process.poll()
        finally:
            _end(process)
    records = read_records(log)[: task.steps]
    first = first or (time.monotonic() - started if records else None)
    if len(records) == task.steps or (records and code == 0):
        return Measured(candidate, tuple(records), first, modules=_modules(folder) if task.module_steps else "")
    return Measured(candidate, failure=_failure(code, output, task, len(records)))


def _modules(folder: Path) -> str:
    try:
        return (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(code: int | None, output: Path, task: Task, steps: int) -> str:
    """Why a run has ended too early, in a line."""
    if code is None:
        return f"{steps} of {task.steps} steps in {task.timeout:.0f} s; raise --timeout, or see {output}"
    if code == 0:
        return "no step was logged; let the script load its config with unishard.load(), without a path"
    text = output.read_text(encoding="utf-8", errors="replace")
    errors = _RAISED.findall(text) or _ERROR.findall(text)[-1:]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("unishard launch: ")]
    return str((errors or lines[:1] or [f"exit code {code}"])[0])
