"""The demo: one training script, one config, both engines, and their loss curves in one plot."""

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
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.table import Table

from unishard.config.describe import count_of
from unishard.errors import BackendError, UnishardError

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


# -- Runs the demo: trains on each engine, compares the curves and plots them ----------------------

# -- Draws the two curves --------------------------------------------------------------------------

_WIDE, _THIN = "#f4a261", "#1d3557"


def plot(one: TrainingCurve, other: TrainingCurve, path: Path) -> None:
    """Write a PNG: the curves on each other, the first wide and light, the second thin and dark; below, their
    difference.

    Args:
        one: The run that is drawn wide.
        other: The run that is drawn thin, with as many updates.
        path: The PNG file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    curves, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    updates = range(1, len(one.losses) + 1)
    curves.plot(updates, one.losses, color=_WIDE, linewidth=7, solid_capstyle="round", label=one.backend)
    curves.plot(updates, other.losses, color=_THIN, linewidth=1.5, label=other.backend)
    curves.set_title(f"A tiny Llama on English text: one script, one config, world size {one.ranks}", loc="left")
    curves.set_ylabel("training loss")
    curves.legend(frameon=False)

    relative = [gap.relative for gap in CurveGap.each(one, other)]
    gaps.bar(updates, relative, color=_THIN, width=0.8)
    gaps.set_ylabel("relative\ndifference")
    gaps.set_xlabel("update")
    gaps.xaxis.get_major_locator().set_params(integer=True)
    gaps.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    gaps.set_ylim(0, 1.25 * max(filter(math.isfinite, relative), default=0) or 1e-7)
    for panel in (curves, gaps):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panel.set_axisbelow(True)
    figure.savefig(path, dpi=150)


BACKENDS = ("fsdp", "deepspeed")
TOLERANCE = 1e-4
_PACKAGES = ("torch", "transformers", "deepspeed", "matplotlib")


def run_demo(*, out: Path, world_size: int = 2, steps: int = 60) -> None:
    """Train the example on FSDP2 and on DeepSpeed ZeRO-3 with one word of the config changed, and compare.

    Prints the progress and a table, and leaves `fsdp.json`, `deepspeed.json` and `loss.png` in `out`.

    Args:
        out: Folder for the results; created if it does not exist.
        world_size: Ranks, all on this machine.
        steps: Updates of each run.

    Raises:
        BackendError: A package that the demo needs is not installed.
        DemoError: A run failed or left no curve, or the two curves differ by more than 1e-4 of the loss.
    """
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise BackendError(f"the demo needs {', '.join(missing)}, not installed here; pip install 'unishard[demo]'")

    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    runs = [
        train(backend, out / f"{backend}.json", world_size=world_size, steps=steps, console=console)
        for backend in BACKENDS
    ]
    gap = CurveGap.between(runs[0], runs[1])
    console.print(_table(runs))
    console.print(
        f"largest difference of the two curves: {gap.absolute:.1e} ({gap.relative:.1e} of the loss) at step {gap.step} "
        f"of {steps}",
        highlight=False,
        soft_wrap=True,
    )
    picture = out / "loss.png"
    plot(runs[0], runs[1], picture)
    console.print(f"curves: {picture}", highlight=False, soft_wrap=True)
    if not gap.relative <= TOLERANCE:  # also when it is not a number
        losses = " and ".join(f"{run.backend} has loss {run.losses[gap.step - 1]:.6f}" for run in runs)
        raise DemoError(
            f"the curves should agree, but at step {gap.step} {losses}; in fp32 they may differ by {TOLERANCE:.0e} of "
            "the "
            "loss. One of the engines does not do what the config asks for: please report it with the two JSON files"
        )


def _table(runs: list[TrainingCurve]) -> Table:
    table = Table(title=f"One script, one config, world size {runs[0].ranks}")
    for heading in ("backend", "first loss", "last loss", "median step", "peak memory of each rank"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for run in runs:
        memory = ", ".join(f"{size / 2**20:.0f}" for size in run.peak_memory_bytes) + " MiB"
        table.add_row(
            run.backend,
            f"{run.losses[0]:.6f}",
            f"{run.losses[-1]:.6f}",
            f"{1e3 * run.median_step_seconds:.0f} ms",
            memory,
        )
    return table
