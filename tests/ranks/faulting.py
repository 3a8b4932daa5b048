"""Ends one rank at a place of a run, as a script would end there, and looks at what all ranks write and how long the others live."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from playing import config, my_rank, own_share

import unishard
from unishard.distributed import early
from unishard.testing import RankFailure, run_ranks
from unishard.testing.models import MODELS

LIMIT = 30.0
"""Seconds after which a rank that lives on counts as hung."""
TIMEOUT = 2.0
"""`communication.desync_timeout`."""
BAD = 13
"""The update in which the fault happens: one whose calls are not checked one by one."""

Scenario = Callable[..., None]


class Ending(NamedTuple):
    """How a run ended."""

    lines: list[str]
    """What all ranks wrote together, in the order of writing."""
    seconds: float
    """From the fault to the end of the last rank."""
    codes: dict[int, str]
    """How each rank's process ended."""
    recorded: dict[int, str]
    """The message in the file that torchrun shows, by rank."""


def started(folder: str) -> None:
    """Note when the fault happens."""
    Path(folder, "started").write_text(str(time.time()))


def end(kind: str, folder: str) -> None:
    """End this rank."""
    started(folder)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        sys.exit(3)
    raise ValueError("a broken sample")


def as_a_script(folder: str, function: Scenario, *arguments: Any) -> None:
    """Run a function as the interpreter runs a script that torchrun has started: errors go to `sys.excepthook`, then to `atexit`."""
    file = os.open(Path(folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": str(Path(folder, f"error{my_rank()}.json"))}
    code = 0
    early.install()  # in a script, `import unishard` does
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


def run(function: Scenario, *arguments: Any, world: int = 2) -> Ending:
    """Run a function on ranks as scripts. It gets a folder of its own first."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, codes = Path(name), {}
        try:
            run_ranks(world, as_a_script, name, function, *arguments, timeout=60 + LIMIT, grace=LIMIT)
        except RankFailure as failure:
            codes = {rank: f"{error.type}: {error.message}" for rank, error in failure.errors.items()}
        ended = time.time()
        output, begun = folder / "output", folder / "started"
        files = {rank: folder / f"error{rank}.json" for rank in range(world)}
        return Ending(
            output.read_text(errors="replace").splitlines() if output.exists() else [],
            ended - float(begun.read_text()) if begun.exists() else -1.0,
            codes,
            {rank: json.loads(file.read_text())["message"]["message"] for rank, file in files.items() if file.exists()},
        )


@cache
def endings(runs: tuple[tuple[Scenario, tuple[Any, ...]], ...]) -> dict[tuple[Scenario, tuple[Any, ...]], Ending]:
    """Endings of runs of two ranks each, four at a time: most of their time they wait."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(runs, pool.map(lambda each: run(each[0], *each[1]), runs), strict=True))


# -- one rank ends --------------------------------------------------------------------------------------------------------


def train(folder: str, place: str, kind: str, backend: str, victim: int = 1) -> None:
    """A run of 20 updates in which one rank ends at a place: before or inside `prepare`, or at update 13."""

    def at(here: str) -> None:
        if my_rank() == victim and here == place:
            end(kind, folder)

    at("before prepare")
    cfg = config(backend, optimizer=None, communication={"desync_timeout": TIMEOUT})
    with unishard.init(cfg):
        at("init")
        model = MODELS["mlp"].build()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        at("optimizer")
        return torch.optim.SGD(parameters, lr=0.1)

    broadcast = dist.broadcast
    dist.broadcast = lambda *args, **kwargs: at("prepare") or broadcast(*args, **kwargs)
    engine = unishard.prepare(model, cfg, optimizer)
    dist.broadcast = broadcast
    update, shards = engine._adapter.update, engine._adapter.optimizer_shards
    for number, batch in enumerate(own_share(20), start=1):
        now = number == BAD
        hook = model.blocks[1].register_forward_hook(lambda *_: at("forward")) if now else None
        loss = engine(**batch).loss
        if hook is not None:
            hook.remove()
            loss.register_hook(lambda gradient: at("backward"))
        engine.backward(loss)
        if now:
            engine._adapter.update = lambda *args, **kwargs: at("step") or update(*args, **kwargs)
            engine._adapter.optimizer_shards = lambda parameter: at("save") or shards(parameter)
        engine.step()
        if now:
            engine.save(str(Path(folder, "checkpoints")))


# -- one rank goes its own way --------------------------------------------------------------------------------------------


def misuse(folder: str, act: Callable[..., None], backend: str, strategy: str = "full_shard") -> None:
    """A run of 30 updates in which the ranks make different calls at update 13; `act` gets an engine and a batch more than it needs."""
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
    cfg = config(backend, {"strategy": "full_shard", "units": ["Expert"]}, communication={"desync_timeout": TIMEOUT})
    model = Branches(wider)
    engine = unishard.prepare(model, cfg)
    for number, batch in enumerate(own_share(30), start=1):
        if number == first:
            model.takes_left = my_rank() == 0
            started(folder)
        engine.backward(engine(**batch))
        engine.step()


# -- signals --------------------------------------------------------------------------------------------------------------


def signalled(folder: str, backend: str, name: str, on_signal: tuple[str, ...]) -> None:
    """Rank 0 waits for rank 1, which is late, and gets a signal twice: inside gloo, where Python handles none."""
    cfg = config(backend, checkpoint={"dir": str(Path(folder, "checkpoints")), "on_signal": [*on_signal]} if on_signal else None)
    engine = unishard.prepare(MODELS["mlp"].build(), cfg)
    if my_rank() == 0:
        number = signal.Signals[name]
        started(folder)
        for delay in (1.0, 1.2, 2.5):  # a terminal and torchrun both pass on a Ctrl-C: the second does not count
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
    else:
        time.sleep(4.0)
    engine.mean(1.0)
