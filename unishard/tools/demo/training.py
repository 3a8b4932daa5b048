"""Runs the example on one engine through torchrun."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Self, TextIO

from rich.console import Console

from unishard.config.describe import count_of
from unishard.errors import UnishardError

# -- The results of a run of the example, and the difference between two runs ----------------------


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """One run of `examples/train_llama.py`, from its JSON file."""

    backend: str
    ranks: int
    losses: list[float]
    """Mean loss over all ranks, one for each update."""
    grad_norms: list[float]
    """Global norm before clipping, one for each update."""
    step_seconds: list[float]
    """Time of each update; the first one includes lazy initialization."""
    peak_memory_bytes: list[int]
    """One for each rank."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the JSON file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def median_step_seconds(self) -> float:
        """Typical time of an update."""
        return median(self.step_seconds)


@dataclass(frozen=True, slots=True)
class CurveGap:
    """The difference of two curves at one update."""

    step: int
    """The update, counted from 1."""
    absolute: float
    relative: float
    """The difference divided by the first curve's loss."""

    @classmethod
    def each(cls, one: TrainingCurve, other: TrainingCurve) -> list[Self]:
        """The difference of two curves of the same length at every update."""
        pairs = zip(one.losses, other.losses, strict=True)
        return [cls(step, abs(a - b), abs(a - b) / abs(a) if a else abs(a - b)) for step, (a, b) in enumerate(pairs, 1)]

    @classmethod
    def between(cls, one: TrainingCurve, other: TrainingCurve) -> Self:
        """The largest relative difference; one that is not a number counts as the largest."""
        return max(cls.each(one, other), key=lambda gap: math.inf if math.isnan(gap.relative) else gap.relative)


# -- Runs a command in a new session, and makes sure that no process outlives it -------------------

_REQUESTS = (signal.SIGTERM, signal.SIGHUP)
_GRACE = 40.0
"""Seconds until the command is killed; torchrun kills ranks after 30 (torch 2.13, multiprocessing/api.py)."""


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a new session, with stdout and stderr as one stream of text.

    Leaving the block waits for the command to exit. On an exception, including Ctrl-C, the command and its children are
    terminated first. SIGTERM and SIGHUP to this process become such an exception: `SystemExit` with 128 plus the signal
    number.
    """
    # A new session, so that only we signal torchrun, and not the terminal too while it terminates its ranks.
    with (
        _handling(_REQUESTS, _leave),
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            with _handling((*_REQUESTS, signal.SIGINT), signal.SIG_IGN):
                _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # torchrun forwards it to its ranks, which have their own sessions
    try:
        process.communicate(timeout=_GRACE)  # until all processes that hold the stream have exited
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _handling(signals: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Install a handler for signals, except those that this process was started to ignore (nohup); restores the
    previous handlers.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.getsignal(number) for number in signals if signal.getsignal(number) is not signal.SIG_IGN
        }
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


_LAST_LINES = 25
_PROGRESS = re.compile(r"(?P<step>step \d+)|\w+: loss ")
_TORCHRUN_REPORT = "torch/distributed/elastic/multiprocessing/api.py"
"""Marks torchrun's report of a failed rank, which tells where it failed, but not why."""


class DemoError(UnishardError):
    """The demo did not finish, or the engines disagree."""


def train(backend: str, result: Path, *, world_size: int, steps: int, console: Console) -> TrainingCurve:
    """Run the example through torchrun, show its progress, and keep all it prints in a log file beside the result.

    Args:
        backend: The word that is changed in the config.
        result: JSON file that the run writes.
        world_size: Ranks.
        steps: Updates.
        console: Where to print.

    If interrupted or terminated, it terminates all ranks, leaves no curve and reports that on standard error.

    Raises:
        DemoError: The run failed, with its last lines, or left no curve of `steps` losses.
    """
    script, config = _find("examples/train_llama.py"), _find("configs/llama_tiny.yaml")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    arguments = ["--config", str(config), "--set", f"backend={backend}", "--steps", str(steps), "--out", str(result)]
    result.unlink(missing_ok=True)  # so that an earlier run's curve is never taken for this one's
    console.rule(f"backend: {backend}", align="left")
    log = result.with_suffix(".log")
    ranks = count_of(world_size, "rank")
    try:
        with (
            console.status(f"{backend}: starting {ranks}") as status,
            log.open("w", buffering=1, encoding="utf-8") as file,
        ):

            def show(line: str, step: str | None) -> None:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
                status.update(f"{backend}: training on {ranks}" if step else f"{backend}: ending {ranks}")

            code, lines = _stream([*launcher, str(script), *arguments], world_size, show, file)
    except (KeyboardInterrupt, SystemExit):
        result.unlink(missing_ok=True)
        sys.stderr.write(
            f"interrupted while training on {backend}: {result} is not written, the output so far is in {log}\n"
        )
        raise
    if code:
        raise DemoError(
            "\n".join(
                [f"training on {backend} failed with exit code {code}; its last lines (all are in {log}):", *lines]
            )
        )
    try:
        run = TrainingCurve.read(result)
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise DemoError(f"training on {backend} ended without a readable {result}: {error}") from error
    if len(run.losses) != steps:
        raise DemoError(f"training on {backend} made {len(run.losses)} updates, expected {steps}; see {result}")
    return run


def _stream(
    command: list[str], world_size: int, show: Callable[[str, str | None], None], log: TextIO
) -> tuple[int, list[str]]:
    """Run a command, show its progress line by line, log everything, and return its exit code and last lines.

    `show` takes a line of progress, and the step if it is about one.
    """
    threads = str(max(1, (os.cpu_count() or 1) // world_size))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONUNBUFFERED": "1"}
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    report = False
    with running(command, environment) as process:
        for line in process.stdout or ():
            log.write(line)
            report = report or _TORCHRUN_REPORT in line
            if not report:
                lines.append(line.rstrip())
            if progress := _PROGRESS.match(line):
                show(line.rstrip(), progress["step"])
    return process.returncode, list(lines)


def _find(path: str) -> Path:
    """A file of the checkout, or of an installed wheel."""
    checkout = Path(__file__).resolve().parents[2]
    name = Path(path).name
    places = [
        checkout / path,
        Path(sysconfig.get_path("data"), "share", "unishard", name),
        Path(sysconfig.get_path("data", sysconfig.get_preferred_scheme("user")), "share", "unishard", name),
    ]
    for place in places:
        if place.is_file():
            return place
    raise DemoError(
        f"cannot find {name}, looked in {', '.join(str(place.parent) for place in places)}; reinstall unishard, or run "
        "from a checkout"
    )
