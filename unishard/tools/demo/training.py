"""Runs the example on one engine through torchrun."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console

from unishard.config.describe import count_of
from unishard.errors import UnishardError
from unishard.tools.demo.curves import TrainingCurve
from unishard.tools.demo.session import running

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
    checkout = Path(__file__).resolve().parents[3]
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
