"""What came of it: an error, a line of a log, a curve, a checkpoint on the disk."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import unishard
from unishard.checkpoint import finding, manifest
from unishard.checkpoint.verifying import damaged

WARNING = re.compile(
    r"rank \d has (waited|been) .*|a signal to .*"
    r"|\[Rank \d\] \[deepspeed\] .*"
    r"|(\[rank\d\]:)?\[W\d+ .*|Exception raised from .*|frame #\d+: .*|<omitting python frames>|"
)
"""What ranks log before it is clear that the run cannot go on: unishard, DeepSpeed, and torch with a stack in C++."""


def caught(kind: type[BaseException], call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call raised of a kind, or `nothing`."""
    try:
        call(*arguments, **named)
    except kind as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """What a call raised of unishard's errors, or `nothing`."""
    return caught(unishard.UnishardError, call, *arguments, **named)


@contextlib.contextmanager
def heard(logger: str = "unishard", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What a logger says in the block."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Wait for a condition; whether it came in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite where a loss is not finite."""
    apart = [abs(own - other) / abs(other) for own, other in zip(losses, reference, strict=True)]
    return max(each if math.isfinite(each) else math.inf for each in apart)


def steps(folder: str | Path) -> list[int]:
    """Of the complete checkpoints there."""
    return [found.step for found in finding.checkpoints(Path(folder))]


def problems_of(folder: Path) -> list[str]:
    """What `unishard checkpoint verify` says of a checkpoint."""
    try:
        return damaged(folder, manifest.read(folder))
    except unishard.CheckpointError as error:
        return [str(error)]


def newest(root: Path) -> str:
    """The name of the newest complete checkpoint, or what is wrong with it; empty if there is none."""
    found = finding.latest(root) if root.exists() else None
    return "" if found is None else "; ".join(problems_of(found)) or found.name
