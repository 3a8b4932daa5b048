"""What the faults of docs/reliability.md do: each is a run of two ranks, which gets a folder and the backend first."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import checked as config
from harness import my_rank, own_share, until, update
from harness.scripts import LIMIT, end, gone_on, process_of, started

import unishard
from unishard.checkpoint import saving
from unishard.distributed import serving
from unishard.testing.models import MODELS

TIMEOUT = 2.0
"""`communication.desync_timeout`."""
BAD = 13
"""The update in which the fault happens: one whose calls are not checked one by one. The one before it is saved."""


def _engine(backend: str, strategy: Any = "full_shard", **sections: Any) -> Any:
    cfg = config(backend, strategy, communication={"desync_timeout": TIMEOUT}, **sections)
    return unishard.prepare(MODELS["mlp"].build(), cfg)


# -- one rank ends, or gets a signal ---------------------------------------------------------------

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
        state, loaded = engine._adapter.optimizer_state, engine._adapter.loaded
        shards = state.shards
        passing(state, "shards", "save")
        engine.save(root)
        passing(engine._adapter, "loaded", "load")
        engine.load(root)
        state.shards, engine._adapter.loaded = shards, loaded

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
        passing(engine._adapter, "update", "step")
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
    engine = _engine(backend)
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
    engine = _engine(backend, checkpoint={"dir": str(Path(folder, "checkpoints")), "async_save": True})
    write = saving.write
    for number, batch in enumerate(own_share(20), start=1):
        if number in (BAD, BAD + 1):
            engine.save()
        if number == BAD:
            engine.wait()
            saving.write = lambda *args, **kwargs: (
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


# -- one rank goes its own way ---------------------------------------------------------------------


def misuse(folder: str, backend: str, act: Callable[..., None], strategy: str = "full_shard") -> None:
    """A run of 30 updates in which the ranks make different calls at update 13; `act` gets an engine and a batch more
    than it needs."""
    engines = [_engine(backend, strategy) for _ in range(2 if act is other_order else 1)]
    for number, batch in enumerate(own_share(30), start=1):
        if number == BAD:
            started(folder)
            act(engines, batch, folder)
        for engine in engines:
            update(engine, batch)


def mean_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Logs on rank 0 only."""
    if my_rank() == 0:
        engines[0].mean(1.0)


def save_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Saves on rank 0 only."""
    if my_rank() == 0:
        engines[0].save(str(Path(folder, "checkpoints")))


def barrier_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Waits on rank 0 only."""
    if my_rank() == 0:
        dist.barrier()


def receive_on_both(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Waits on each rank for what the other one does not send."""
    dist.recv(torch.empty(1), 1 - my_rank())


def other_clip(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Each rank clips to a norm of its own."""
    update(engines[0], batch, clip_grad_norm=1.0 + my_rank())


def other_order(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Two engines, updated in another order on rank 1."""
    for engine in engines if my_rank() == 0 else engines[::-1]:
        update(engine, batch)


def skip_a_batch(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Trains once more on rank 0: rank 1 has skipped a batch, and leaves its loop first."""
    if my_rank() == 0:
        update(engines[0], batch)


def wait_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Exports on rank 1 only."""
    if my_rank() == 1:
        engines[0].export(str(Path(folder, "exported")))


class Branches(torch.nn.Module):
    """A model whose ranks may take different branches."""

    def __init__(self, wider: bool) -> None:
        super().__init__()
        self.inp = torch.nn.Linear(13, 8)
        self.left, self.right = Expert(16), Expert(24 if wider else 16)
        self.head = torch.nn.Linear(8, 11)
        self.takes_left = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss."""
        hidden = self.inp(x)
        hidden = (self.left if self.takes_left else self.right)(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden), labels)


class Expert(torch.nn.Module):
    """One branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def branch(folder: str, backend: str, first: int, wider: bool) -> None:
    """Rank 1 takes the other branch from an update on."""
    ahead = {"prefetch_bucket_size": 0} if wider else {}  # else the wider branch, the last unit, is gathered once
    sharding = {"strategy": "full_shard", "units": ["Expert"]}
    model = Branches(wider)
    engine = unishard.prepare(model, config(backend, sharding, communication={"desync_timeout": TIMEOUT} | ahead))
    for number, batch in enumerate(own_share(30), start=1):
        if number == first:
            model.takes_left = my_rank() == 0
            started(folder)
        engine.backward(engine(**batch))
        engine.step()


# -- data, models, numbers, disks ------------------------------------------------------------------


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
    engine = _engine(backend, training={"gradient_accumulation_steps": 2 if kind == "skips one" else 1})
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
    engine = _engine(backend, training={"nonfinite": nonfinite})
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
    engine = _engine(backend)
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
