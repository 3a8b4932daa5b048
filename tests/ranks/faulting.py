"""Plays a fault of one rank as a script would have it, and looks at what all ranks write, how long they live and what
is on the disk."""

from __future__ import annotations

import atexit
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import checked as config
from harness import my_rank, own_share

import unishard
from unishard.checkpoint import finding, manifest, saving
from unishard.checkpoint.verifying import damaged
from unishard.distributed import master_port
from unishard.testing import RankFailure, run_ranks
from unishard.testing.models import MODELS

LIMIT = 30.0
"""Seconds after which a rank that lives on counts as hung."""
TIMEOUT = 2.0
"""`communication.desync_timeout`."""
BAD = 13
"""The update in which the fault happens: one whose calls are not checked one by one. The one before it is saved."""

Scenario = Callable[..., None]


class Ending(NamedTuple):
    """How a run ended."""

    lines: list[str]
    """What all ranks wrote together, in the order of writing."""
    seconds: float
    """From the fault until the last rank has ended, or has gone on."""
    codes: dict[int, str]
    """How each rank's process ended."""
    recorded: dict[int, str]
    """The message in the file that torchrun shows, by rank."""
    kept: str
    """The newest complete checkpoint, or what is wrong with it; empty if there is none."""


def started(folder: str) -> None:
    """Note when the fault happens."""
    Path(folder, "started").write_text(str(time.time()))


def gone_on(folder: str) -> None:
    """Note that this rank has got over the fault."""
    Path(folder, f"gone_on{my_rank()}").write_text(str(time.time()))


def end(kind: str, folder: str) -> None:
    """End this rank, or stop it until the other one has ended."""
    started(folder)
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LIMIT)
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)
        case "out of memory":
            torch.empty(1 << 46, dtype=torch.uint8)
        case "stop":
            other = Path(folder, f"pid{1 - my_rank()}").read_text()
            then = f"while kill -0 {other} 2>/dev/null; do sleep 0.1; done; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", then], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
    raise ValueError("a broken sample")


def as_a_script(folder: str, function: Scenario, *arguments: Any) -> None:
    """Run a function as the interpreter runs a script that torchrun has started: errors go to `sys.excepthook`, then to
    `atexit`."""
    file = os.open(Path(folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": str(Path(folder, f"error{my_rank()}.json")),
    }
    Path(folder, f"pid{my_rank()}").write_text(str(os.getpid()))
    code = 0
    try:
        function(folder, *arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def run(function: Scenario, *arguments: Any, world: int = 2, env: Mapping[str, str] | None = None) -> Ending:
    """Run a function on ranks as scripts. It gets a folder of its own first."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, codes = Path(name), {}
        try:
            run_ranks(world, as_a_script, name, function, *arguments, timeout=60 + LIMIT, grace=LIMIT, env=env)
        except RankFailure as failure:
            codes = {rank: f"{error.type}: {error.message}" for rank, error in failure.errors.items()}
        ended = max((float(file.read_text()) for file in folder.glob("gone_on*")), default=time.time())
        output, begun = folder / "output", folder / "started"
        files = {rank: folder / f"error{rank}.json" for rank in range(world)}
        return Ending(
            output.read_text(errors="replace").splitlines() if output.exists() else [],
            ended - float(begun.read_text()) if begun.exists() else -1.0,
            codes,
            {rank: json.loads(file.read_text())["message"]["message"] for rank, file in files.items() if file.exists()},
            newest(folder / "checkpoints"),
        )


def newest(root: Path) -> str:
    """The name of the newest complete checkpoint, or what is wrong with it; empty if there is none."""
    found = finding.latest(root) if root.exists() else None
    return "" if found is None else "; ".join(damaged(found, manifest.read(found))) or found.name


@cache
def endings(runs: tuple[tuple[Scenario, tuple[Any, ...]], ...]) -> dict[tuple[Scenario, tuple[Any, ...]], Ending]:
    """Endings of runs of two ranks each, four at a time: most of their time they wait."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(runs, pool.map(_ending_of, runs), strict=True))


def _ending_of(asked: tuple[Scenario, tuple[Any, ...]]) -> Ending:
    function, arguments = asked
    if function is not port_in_use:
        return run(function, *arguments)
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        return run(function, *arguments, env={"MASTER_PORT": str(other_program.getsockname()[1])})


# -- one rank ends ---------------------------------------------------------------------------------


PLACES = ("init", "optimizer", "prepare", "forward", "backward", "step", "save", "load")
"""Where a rank can end: between `init` and `prepare`, in two places inside `prepare`, and in calls of an engine."""


def train(folder: str, backend: str, place: str, kind: str, victim: int = 1) -> None:
    """A run of 20 updates in which one rank ends at a place: before or inside `prepare`, or at update 13."""

    done = False

    def at(here: str) -> None:
        nonlocal done
        if my_rank() == victim and here == place and not done:
            done = True
            end(kind, folder)

    cfg = config(backend, optimizer=None, communication={"desync_timeout": TIMEOUT / 2 if kind == "stop" else TIMEOUT})
    unishard.dataloader(range(64), cfg)  # the first call that belongs to a rank
    at("before prepare")
    with unishard.init(cfg):
        at("init")
        model = MODELS["mlp"].build()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        at("optimizer")
        return torch.optim.SGD(parameters, lr=0.1)

    broadcast = dist.broadcast
    new_group = dist.new_group
    dist.broadcast = lambda *args, **kwargs: at("prepare") or broadcast(*args, **kwargs)
    dist.new_group = lambda *args, **kwargs: at("group") or new_group(*args, **kwargs)
    engine = unishard.prepare(model, cfg, optimizer)
    dist.broadcast, dist.new_group = broadcast, new_group
    root, adapter = str(Path(folder, "checkpoints")), engine._adapter
    update, shards, loaded = adapter.update, adapter.optimizer_shards, adapter.loaded
    for number, batch in enumerate(own_share(20), start=1):
        now = number == BAD
        if now:
            engine.save(root)
        hook = model.blocks[1].register_forward_hook(lambda *_: at("forward")) if now else None
        loss = engine(**batch).loss
        if hook is not None:
            hook.remove()
            loss.register_hook(lambda gradient: at("backward"))
        engine.backward(loss)
        if now:
            adapter.update = lambda *args, **kwargs: at("step") or update(*args, **kwargs)
        engine.step()
        if now:
            adapter.optimizer_shards = lambda parameter: at("save") or shards(parameter)
            engine.save(root)
            adapter.loaded = lambda: at("load") or loaded()
            engine.load(root)


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
    engine = unishard.prepare(MODELS["mlp"].build(), config(backend, communication={"desync_timeout": TIMEOUT}))
    try:
        with engine:
            for number, batch in enumerate(own_share(20), start=1):
                if number == BAD and my_rank() == victim:
                    started(folder)
                    raise ERRORS[kind]()
                update(engine, batch)
    finally:
        if my_rank() == victim and slowly:  # as `wandb.finish()` does
            await_end(int(Path(folder, f"pid{1 - victim}").read_text()))


def await_end(process: int) -> None:
    """Wait until a process has ended; no longer than a hung one lives."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.1)


def die_in_the_background(folder: str, backend: str, victim: int = 1) -> None:
    """A run that saves in the background; one rank is killed in the second save."""
    root = Path(folder, "checkpoints")
    cfg = config(backend, communication={"desync_timeout": TIMEOUT}, checkpoint={"dir": str(root), "async_save": True})
    engine = unishard.prepare(MODELS["mlp"].build(), cfg)
    write = saving.write
    for number, batch in enumerate(own_share(20), start=1):
        if number in (BAD, BAD + 1):
            engine.save()
        if number == BAD:
            engine.wait()
            saving.write = lambda *args, **kwargs: (
                end("kill", folder) if my_rank() == victim else write(*args, **kwargs)
            )
        update(engine, batch)
    engine.wait()


# -- one rank goes its own way ---------------------------------------------------------------------


def misuse(folder: str, backend: str, act: Callable[..., None], strategy: str = "full_shard") -> None:
    """A run of 30 updates in which the ranks make different calls at update 13; `act` gets an engine and a batch more
    than it needs."""
    cfg = config(backend, strategy, communication={"desync_timeout": TIMEOUT})
    engines = [unishard.prepare(MODELS["mlp"].build(), cfg) for _ in range(2 if act is other_order else 1)]
    for number, batch in enumerate(own_share(30), start=1):
        if number == BAD:
            started(folder)
            act(engines, batch, folder)
        for engine in engines:
            update(engine, batch)


def update(engine: Any, batch: Any, **step: Any) -> None:
    """One update."""
    engine.backward(engine(**batch).loss)
    engine.step(**step)


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
    ahead = (
        {"prefetch_bucket_size": 0} if wider else {}
    )  # else the wider branch, which is the last unit, is gathered once
    cfg = config(
        backend, {"strategy": "full_shard", "units": ["Expert"]}, communication={"desync_timeout": TIMEOUT} | ahead
    )
    model = Branches(wider)
    engine = unishard.prepare(model, cfg)
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
    master_port._ANSWER = 5.0
    started(folder)
    unishard.prepare(MODELS["mlp"].build(), config(backend))


def reading(folder: str, backend: str, kind: str) -> None:
    """Loops over `engine.batches`, where rank 1 reads less than rank 0, or skips the rest of the body for a batch."""
    window = {"gradient_accumulation_steps": 2 if kind == "skips one" else 1}
    engine = unishard.prepare(
        MODELS["mlp"].build(), config(backend, training=window, communication={"desync_timeout": TIMEOUT})
    )
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
    cfg = config(backend, training={"nonfinite": nonfinite}, communication={"desync_timeout": TIMEOUT})
    engine = unishard.prepare(MODELS["mlp"].build(), cfg)
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
    engine = unishard.prepare(MODELS["mlp"].build(), config(backend, communication={"desync_timeout": TIMEOUT}))
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


# -- signals ---------------------------------------------------------------------------------------


def signalled(folder: str, backend: str, name: str, on_signal: tuple[str, ...]) -> None:
    """Rank 0 waits for rank 1, which is late, and gets a signal twice: inside gloo, where Python handles none."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # also where the tests run in the background, which ignores it
    cfg = config(
        backend, checkpoint={"dir": str(Path(folder, "checkpoints")), "on_signal": [*on_signal]} if on_signal else None
    )
    engine = unishard.prepare(MODELS["mlp"].build(), cfg)
    if my_rank() == 0:
        number = signal.Signals[name]
        started(folder)
        for delay in (1.0, 1.2, 2.5):  # a terminal and torchrun both pass on a Ctrl-C: the second does not count
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    else:
        time.sleep(4.0)
    engine.mean(1.0)


def terminated(folder: str, backend: str, place: str, victim: int) -> None:
    """A run with `checkpoint.on_signal` in which one rank gets a SIGTERM at a place of update 13."""
    saving = {"dir": str(Path(folder, "checkpoints")), "on_signal": ["TERM"]}

    told = False

    def at(here: str) -> None:
        nonlocal told
        if my_rank() == victim and here == place and not told:
            told = True
            started(folder)
            os.kill(os.getpid(), signal.SIGTERM)

    model = MODELS["mlp"].build()
    engine = unishard.prepare(model, config(backend, checkpoint=saving, communication={"desync_timeout": TIMEOUT}))
    adapter = engine._adapter
    update, shards, loaded = adapter.update, adapter.optimizer_shards, adapter.loaded
    for number, batch in enumerate(own_share(20), start=1):
        now = number == BAD
        if now:
            adapter.optimizer_shards = lambda parameter: at("save") or shards(parameter)
            engine.save()
            adapter.loaded = lambda: at("load") or loaded()
            engine.load()
            adapter.optimizer_shards, adapter.loaded = shards, loaded
            model.blocks[1].register_forward_hook(lambda *_: at("forward"))
            adapter.update = lambda *args, **kwargs: at("step") or update(*args, **kwargs)
        loss = engine(**batch).loss
        if now:
            loss.register_hook(lambda gradient: at("backward"))
        at("between calls" if now else "")
        engine.backward(loss)
        engine.step()
