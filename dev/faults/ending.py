"""What one rank does that ends, or gets a signal. Each is a run of two ranks, which gets a folder and the backend first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unishard
from dev.faults.trained import BAD, TIMEOUT, prepared
from dev.ranks.judging import until
from dev.ranks.scripts import LIMIT, end, process_of, started
from dev.ranks.training import checked as config
from dev.ranks.training import my_rank, own_share, update
from unishard.checkpoint import saving
from unishard.testing.models import MODELS

PLACES = ("init", "optimizer", "prepare", "forward", "backward", "step", "save", "load")
"""Where a rank can end: between `init` and `prepare`, in two places inside `prepare`, and in calls of an engine."""


def train(folder: str, backend: str, place: str, kind: str, victim: int = 1) -> None:
    """A run of 20 updates in which one rank ends at a place: before or inside `prepare`, or at update 13. With a SIGTERM
    that lets all save, the places of save and load come before the others."""
    done, saves = False, kind == "SIGTERM, to save"

    def at(here: str) -> None:
        nonlocal done
        if my_rank() == victim and here == place and not done:
            done = True
            end(kind, folder)

    def passing(where: Any, name: str, here: str) -> None:
        call = getattr(where, name)
        setattr(where, name, lambda *arguments, **named: at(here) or call(*arguments, **named))

    root = str(Path(folder, "checkpoints"))
    cfg = config(
        backend,
        optimizer=None,
        communication={"desync_timeout": TIMEOUT / 2 if kind == "stop" else TIMEOUT},
        checkpoint={"dir": root, "on_signal": ["TERM"]} if saves else None,
    )
    unishard.dataloader(range(64), cfg)  # the first call that belongs to a rank
    at("before prepare")
    with unishard.init(cfg):
        at("init")
        model = MODELS["mlp"].build()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        at("optimizer")
        return torch.optim.SGD(parameters, lr=0.1)

    broadcast, new_group = dist.broadcast, dist.new_group
    passing(dist, "broadcast", "prepare")
    passing(dist, "new_group", "group")
    engine = unishard.prepare(model, cfg, optimizer)
    dist.broadcast, dist.new_group = broadcast, new_group

    def save_and_load() -> None:
        state, loaded = engine._adapter.updates.optimizer_state, engine._adapter.weights_written
        shards = state.shards
        passing(state, "shards", "save")
        engine.save(root)
        passing(engine._adapter, "weights_written", "load")
        engine.load(root)
        state.shards, engine._adapter.weights_written = shards, loaded

    for number, batch in enumerate(own_share(20), start=1):
        if number != BAD:
            update(engine, batch)
            continue
        save_and_load() if saves else engine.save(root)
        model.blocks[1].register_forward_hook(lambda *_: at("forward"))
        loss = engine(**batch).loss
        loss.register_hook(lambda gradient: at("backward"))
        at("between calls")
        engine.backward(loss)
        passing(engine._adapter.updates, "update", "step")
        engine.step()
        if not saves:
            save_and_load()


class Unreadable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise KeyError("no such attribute")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "short": lambda: ValueError("a broken sample"),
    "long": lambda: ValueError("a broken sample " + "0" * 30_000_000),
    "unreadable": Unreadable,
    "group": lambda: ExceptionGroup("two samples", [ValueError("a broken sample"), TypeError("another one")]),
}


def leave(folder: str, backend: str, kind: str, slowly: bool = True, victim: int = 1) -> None:
    """A run that one rank leaves with an error at update 13; with `slowly` the process ends only after that of the
    other rank."""
    engine = prepared(backend)
    try:
        with engine:
            for number, batch in enumerate(own_share(20), start=1):
                if number == BAD and my_rank() == victim:
                    started(folder)
                    raise ERRORS[kind]()
                update(engine, batch)
    finally:
        if my_rank() == victim and slowly:  # as `wandb.finish()` does
            until(lambda: _ended(process_of(folder, 1 - victim)), LIMIT)


def _ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def die_in_the_background(folder: str, backend: str, victim: int = 1) -> None:
    """A run that saves in the background; one rank is killed in the second save."""
    engine = prepared(backend, checkpoint={"dir": str(Path(folder, "checkpoints")), "async_save": True})
    write = saving.write  # type: ignore[attr-defined]
    for number, batch in enumerate(own_share(20), start=1):
        if number in (BAD, BAD + 1):
            engine.save()
        if number == BAD:
            engine.wait()
            saving.write = lambda *args, **kwargs: (  # type: ignore[attr-defined]
                end("kill", folder) if my_rank() == victim else write(*args, **kwargs)
            )
        if number > BAD:
            break  # in another update the ranks may meet the end before the save does
        update(engine, batch)
    engine.wait()


def signalled(folder: str, backend: str, name: str, on_signal: tuple[str, ...]) -> None:
    """Rank 0 waits for rank 1, which is late, and gets a signal twice: inside gloo, where Python handles none."""
    # Also where the tests run in the background, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    saving = {"dir": str(Path(folder, "checkpoints")), "on_signal": [*on_signal]} if on_signal else None
    engine = unishard.prepare(MODELS["mlp"].build(), config(backend, checkpoint=saving))
    if my_rank() == 0:
        started(folder)
        for delay in (1.0, 1.2, 2.5):  # a terminal and torchrun both pass on a Ctrl-C: the second does not count
            threading.Timer(delay, os.kill, (os.getpid(), signal.Signals[name])).start()
    else:
        time.sleep(4.0)
    engine.mean(1.0)
