"""What models, data, numbers, ports and disks do that fail. Each is a run of two ranks, which gets a folder and the
backend first."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unishard
from dev.faults.trained import BAD, TIMEOUT, prepared
from dev.ranks.scripts import gone_on, started
from dev.ranks.training import checked as config
from dev.ranks.training import my_rank, own_share, update
from unishard.distributed import serving
from unishard.testing.models import MODELS


def other_model(folder: str, backend: str) -> None:
    """Another width on rank 1."""
    started(folder)
    unishard.prepare(torch.nn.Linear(4, 4 + my_rank()), config(backend))


def port_in_use(folder: str, backend: str) -> None:
    """Another program listens at MASTER_PORT, and never answers."""
    serving._ANSWER, os.environ["MASTER_PORT"] = 5.0, Path(folder, "port").read_text()
    started(folder)
    unishard.prepare(MODELS["mlp"].build(), config(backend))


def reading(folder: str, backend: str, kind: str) -> None:
    """Loops over `engine.batches`, where rank 1 reads less than rank 0, or skips the rest of the body for a batch."""
    engine = prepared(backend, training={"gradient_accumulation_steps": 2 if kind == "skips one" else 1})
    mine = own_share(20 if my_rank() == 0 or kind == "skips one" else 15)
    started(folder)
    for number, batch in enumerate(engine.batches(mine if kind != "a stream" else iter(mine)), start=1):
        if number == BAD and my_rank() == 1 and kind == "skips one":
            continue
        update(engine, batch)


def not_a_number(folder: str, backend: str, nonfinite: str, scale: float) -> None:
    """The loss of rank 1 is not finite in one update. Where such an update is skipped, it is on every rank, and
    training goes on."""
    root = str(Path(folder, "checkpoints"))
    engine = prepared(backend, training={"nonfinite": nonfinite})
    for number, batch in enumerate(own_share(20), start=1):
        if number == BAD:
            engine.save(root)
            started(folder)
        engine.backward(engine(**batch).loss * (scale if number == BAD and my_rank() == 1 else 1.0))
        if engine.step().skipped != (number == BAD):
            raise AssertionError(f"update {number}")
        if number == BAD:
            gone_on(folder)
    engine.save(root)


def disk(folder: str, backend: str, kind: str, victim: int = 1) -> None:
    """A run that saves before updates 13 and 14; the disk of one rank fails in the second save."""
    root = Path(folder, "checkpoints")
    engine = prepared(backend)
    for number, batch in enumerate(own_share(20), start=1):
        if number == BAD + 1:
            started(folder)
            if my_rank() == victim:
                _harm(root, kind)
            dist.barrier()
        if number in (BAD, BAD + 1):
            engine.save(str(root))
        update(engine, batch)
        if number == BAD + 1:
            gone_on(folder)
    if kind == "vanished before":
        engine.load(str(root))


def _harm(root: Path, kind: str) -> None:
    """Let the disk fail from here on, or once."""
    failures = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO}
    acts = {"slow": lambda: time.sleep(3 * TIMEOUT), "vanishes": lambda: _vanish(root)}
    if kind == "vanished before":
        _vanish(root)
        return
    acted = False

    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal acted
        writes = (
            name == "open" and isinstance(arguments[0], str | os.PathLike) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if not (writes or name in ("os.mkdir", "os.rename")) or str(root) not in os.fspath(arguments[0]):
            return
        if kind == "vanishes" and ".distcp" not in os.fspath(arguments[0]):
            return
        if kind in failures:
            raise OSError(failures[kind], os.strerror(failures[kind]), os.fspath(arguments[0]))
        if not acted:
            acted = True
            acts[kind]()

    sys.addaudithook(fail)


def _vanish(root: Path) -> None:
    """In one step: a folder that another rank writes into cannot always be emptied."""
    root.rename(root.with_name("vanished"))
