"""Runs a function on several local ranks, each in its own process, from a test or a script."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from unishard.contract import registry


class RankError(NamedTuple):
    """Why one rank returned no result."""

    type: str
    """Name of the exception's class; `Died` for a process that exited without a result, `Hung` for one that was
    killed."""
    message: str
    traceback: str
    """The rank's traceback; for a hung rank the stacks of its threads when it was killed."""


class RankFailure(AssertionError):
    """At least one rank failed, died or hung."""

    def __init__(self, world: int, errors: Mapping[int, RankError], finished: Sequence[int]) -> None:
        self.world = world
        self.errors = dict(errors)
        """By rank, the first failure first."""
        self.finished = tuple(finished)
        """Ranks that returned a result."""
        super().__init__(self._describe())

    def _describe(self) -> str:
        first = next(iter(self.errors))
        lines = [f"rank {first} of {self.world} failed: {self._line(first)}"]
        lines += [f"rank {rank}: {self._line(rank)}" for rank in self.errors if rank != first]
        lines += [f"rank {rank}: finished" for rank in self.finished]
        for rank, error in self.errors.items():
            if error.traceback:
                lines += ["", f"-- rank {rank} --", error.traceback.rstrip()]
        return "\n".join(lines)

    def _line(self, rank: int) -> str:
        error = self.errors[rank]
        return f"{error.type}: {error.message}"


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(*args)` on `world` local ranks and return their results in rank order.

    Each rank has torchrun's variables in its environment; `fn` initializes the process group itself, as
    `unishard.prepare` does. With a CUDA device for each rank, the ranks see all devices and are spawned, since CUDA
    does not support fork. Otherwise they see none, compute on the CPU with one thread each, and are forked from a
    server that has imported torch and the engines (about 0.1 s per start). CUDA_VISIBLE_DEVICES in `env` overrides
    this: ranks that share a device must initialize a gloo group themselves. Ranks exit without interpreter
    finalization, in which gloo's threads may abort the process (pytorch issue 190489, torch 2.13).

    Args:
        world: Number of ranks.
        fn: A picklable function, at the top level of a module.
        args: Its arguments, the same on every rank.
        timeout: Seconds until ranks without a result are killed.
        grace: Seconds that the other ranks have to report their own error once one rank has failed.
        env: Additional environment variables for every rank.

    Raises:
        RankFailure: A rank raised an error, died or timed out. No process outlives the call.
    """
    work = pickle.dumps((fn, args))
    group = _Group(world, timeout, grace)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            group.start(work, dict(env or {}), Path(folder))
            group.collect()
        finally:
            group.end()
    if group.errors:
        raise RankFailure(world, group.errors, sorted(group.results))
    return [group.results[rank] for rank in range(world)]


class _Group:
    """The processes of one run and their results so far."""

    def __init__(self, world: int, timeout: float, grace: float) -> None:
        self.world = world
        self.timeout = timeout
        self.grace = grace
        self.results: dict[int, Any] = {}
        self.errors: dict[int, RankError] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._stacks: dict[int, Path] = {}

    def start(self, work: bytes, env: dict[str, str], folder: Path) -> None:
        """Start all ranks."""
        cuda = _uses_cuda(self.world, env)
        context = _context(cuda=cuda)
        port = _free_port()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            self._stacks[rank] = folder / f"rank{rank}.txt"
            environment = _environment(rank, self.world, port, cuda=cuda) | env
            process = context.Process(
                target=_rank_main, args=(work, environment, theirs, str(self._stacks[rank])), name=f"rank{rank}"
            )
            self._connections[rank], self._processes[rank] = ours, process
            process.start()
            theirs.close()

    def collect(self) -> None:
        """Wait until every rank has returned a result, died or timed out."""
        deadline = time.monotonic() + self.timeout
        while waiting := [rank for rank in range(self.world) if rank not in self.results and rank not in self.errors]:
            ready = wait(
                [source for rank in waiting for source in (self._connections[rank], self._processes[rank].sentinel)],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                self._kill_hung(waiting)
                return
            for rank in waiting:
                if self._connections[rank] in ready or self._processes[rank].sentinel in ready:
                    self._take(rank)
            if self.errors:
                deadline = min(deadline, time.monotonic() + self.grace)

    def end(self) -> None:
        """Release the ranks, and make sure that they have exited."""
        for rank, process in self._processes.items():
            self._connections[rank].close()
            if process.pid is None:
                continue
            if rank in self.results:
                process.join(5.0)
            process.kill()
            process.join()
            process.close()

    def _take(self, rank: int) -> None:
        try:
            sent = self._connections[rank].recv_bytes() if self._connections[rank].poll() else None
        except (EOFError, OSError):
            sent = None
        answer = None if sent is None else _read(sent)
        if answer is None:
            self._processes[rank].join(5.0)
            self.errors[rank] = RankError(
                "Died", f"the process ended with {_ending(self._processes[rank].exitcode)} before it answered", ""
            )
        elif isinstance(answer, RankError):
            self.errors[rank] = answer
        else:
            self.results[rank] = answer[0]

    def _kill_hung(self, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, self._processes[rank].pid), signal.SIGUSR1)  # writes the stacks of its threads
        time.sleep(0.5)
        first = next(iter(self.errors), None)
        why = (
            f"no answer within {self.timeout:g} s"
            if first is None
            else f"no answer within {self.grace:g} s after rank {first} failed"
        )
        for rank in ranks:
            self._processes[rank].kill()
            stacks = self._stacks[rank].read_text(errors="replace") if self._stacks[rank].exists() else ""
            self.errors[rank] = RankError("Hung", f"{why}; killed", stacks)


def _read(sent: bytes) -> Any:
    """A rank's answer: a 1-tuple with its result, or its error."""
    try:
        return pickle.loads(sent)
    except Exception as error:  # unpickling can raise anything
        return RankError(type(error).__name__, f"its result cannot be unpickled: {error}", traceback.format_exc())


def _rank_main(work: bytes, env: dict[str, str], answers: Connection, stacks: str) -> None:
    """The main function of a rank: runs the function, sends the answer, and exits without finalization."""
    code = 1
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            os.environ.clear()  # a forked rank inherits the server's environment, which may be outdated
            os.environ.update(env)
            if not torch.cuda.is_available():
                torch.set_num_threads(1)
            gc.freeze()  # so that collections neither scan nor copy-on-write the memory shared with the server
            fn, args = pickle.loads(work)
            # Plain pickle copies tensors; multiprocessing's would share memory with a process that is about to exit.
            answer = pickle.dumps((fn(*args),))
            code = 0
        except BaseException as error:
            answer = pickle.dumps(RankError(type(error).__name__, str(error), traceback.format_exc()))
        with contextlib.suppress(OSError):
            answers.send_bytes(answer)
            if code == 0:
                answers.poll(None)  # wait until all are done: rank 0 serves the store that the others may still need
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _uses_cuda(world: int, env: Mapping[str, str]) -> bool:
    """Whether the ranks use CUDA: there is a device for each, or the caller names devices."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    return torch.cuda.is_available() and (torch.cuda.device_count() >= world if named is None else bool(named))


def _context(*, cuda: bool) -> Any:
    """Forkserver with the engines imported; spawn with CUDA, which does not support fork."""
    if cuda:
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_preload())
    with _server_environment():
        forkserver.ensure_running()
    _await_server()
    return context


@cache
def _await_server() -> None:
    """Wait once until the server has imported everything, so that this does not count as time of the first ranks."""
    process = mp.get_context("forkserver").Process(target=int)
    process.start()
    process.join()


@cache
def _preload() -> list[str]:
    """Modules that many ranks import, at a cost of up to 2 s in each; the server ignores those that are not
    installed.
    """
    engines: set[str] = set()
    for name in registry.available():
        backend = registry.get(name)
        engines |= {*backend.requires, f"{type(backend).__module__.partition('.')[0]}.build"}
    testing = {"pytest", "lightning", "unishard.cli"} & sys.modules.keys()  # as the module of a rank's function will
    return [
        "torch.distributed.fsdp",
        "unishard.engine.prepare",
        *sorted(engines),
        "unishard.testing.conformance",
        "unishard.testing.first_use",
        *testing,
    ]


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """Set the environment that the server needs before it imports torch and the engines; restores this process's
    own.
    """
    before = dict(os.environ)
    os.environ.update(_on_cpu())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _on_cpu() -> dict[str, str]:
    """One thread per rank, no CUDA device, and no accelerator detection (DeepSpeed 0.19.8,
    accelerator/real_accelerator.py).
    """
    return {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _environment(rank: int, world: int, port: int, *, cuda: bool) -> dict[str, str]:
    """This process's environment with the variables that torchrun sets."""
    return {
        **os.environ,
        **({} if cuda else _on_cpu()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    """One below those that systems give out, which a connection of any program may take before rank 0 listens."""
    while True:
        port = random.SystemRandom().randint(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
