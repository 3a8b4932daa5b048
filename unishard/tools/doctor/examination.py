"""Runs all checks, in the order of the report; some on ranks that it starts on this host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from unishard.config.describe import count_of
from unishard.config.rendezvous import rendezvous
from unishard.config.topology import Topology
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.contract.tested_versions import tested
from unishard.errors import ConfigError
from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.devices import devices
from unishard.tools.doctor.packages import backends, found, packages, probes, python

_SECONDS = 180.0
"""For which ranks on this host may run."""


def examine(ranks: int | None = None) -> Iterator[Check]:
    """Run all checks. Imports the installed engines.

    Args:
        ranks: So many processes are started on this host, and connected.
    """
    yield python()
    usable, unreadable = found()
    needed = {"torch": "torch"} | {package: extra for backend in usable for package, extra in backend.requires.items()}
    lines = list(packages(tested(usable), needed))
    yield from lines
    # Packages that are not installed or cannot be imported are not checked further.
    unusable = {
        line.name
        for line in lines
        if line.name in needed and (line.status == Status.FAIL or line.details["version"] is None)
    }
    yield from unreadable
    yield from backends(usable, unusable)
    yield from probes(
        {"unishard": CORE_PRIVATE_API} | {backend.name: backend.private_api for backend in usable}, unusable
    )
    if "torch" not in unusable:
        yield from devices()
    yield _launcher(os.environ)
    if ranks is not None and "torch" not in unusable:
        yield from local_ranks(ranks)


def place(environ: Mapping[str, str] = os.environ) -> Topology:
    """This process among those that a launcher has started; a single one if the launcher's variables cannot be read."""
    try:
        topology = Topology.from_environment(environ)
        rendezvous(topology, environ)
    except ConfigError:
        return Topology()
    return topology


def connected(topology: Topology) -> list[Check]:
    """Connect with the other processes of the launcher, and reduce a tensor over them. Collective.

    Returns:
        The checks on rank 0, and on every rank that cannot connect.
    """
    found: list[Check] = import_module("unishard.tools.doctor.ranks").connections(topology)
    return found


def worst(checks: Sequence[Check]) -> Status:
    """The status of a whole report."""
    return max((check.status for check in checks), key=list(Status).index, default=Status.OK)


def _launcher(environ: Mapping[str, str]) -> Check:
    """Check the variables of torchrun or srun, which are read when a run starts."""
    try:
        topology = Topology.from_environment(environ)
        rendezvous(topology, environ)
    except ConfigError as error:
        instead = "unset these variables, or start with torchrun, srun or python"
        return Check("launcher", Status.FAIL, str(error).partition("; ")[0], instead)
    if topology.launcher == "python":
        return Check("launcher", Status.OK, "none; one rank")
    return Check("launcher", Status.OK, f"{topology.launcher}, rank {topology.rank} of {topology.world_size}")


# -- The answer of the whole report: which engines can train here, on what, and what keeps the others from it. Pure --

_BACKEND = "backend "
_PROBE = "probe "


def verdict(checks: Sequence[Check]) -> Iterator[str]:
    """One line for the engines that can train, one for each that cannot, and one for each other check that fails."""
    backends = [check for check in checks if check.name.startswith(_BACKEND)]
    ready = [check.name.removeprefix(_BACKEND) for check in backends if check.status is Status.OK]
    failing = [check for check in checks if check.status is Status.FAIL]
    if any(check.name in ("torch", "python") for check in failing):
        ready = []
    if ready:
        but = f", after {count_of(len(failing), 'repair')}" if failing else ""
        yield f"{' and '.join(ready)} can train here{_where(checks)}{but}"
    else:
        yield "nothing can train here"
    named = [check for check in backends if check.status is not Status.OK]
    for check in [*named, *(check for check in failing if check not in named)]:
        yield f"{check.name}: {check.found}" + (f"; {check.instead}" if check.instead else "")


def is_probe(check: Check) -> bool:
    """Whether a check is about private names of an engine, which only a workaround needs."""
    return check.name.startswith(_PROBE)


def _where(checks: Sequence[Check]) -> str:
    count = next((check.details.get("count") for check in checks if check.name == "accelerators"), None)
    if count is None:
        return ""
    return f" on {count_of(count, 'device')}" if count else " on the CPU"


def local_ranks(count: int) -> list[Check]:
    """The checks of `unishard.tools.doctor.ranks` on so many processes of this host."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    processes = []
    with tempfile.TemporaryDirectory(prefix="unishard-doctor-") as folder:
        try:
            for rank in range(count):
                environ = {
                    **os.environ,
                    **{name: str(value) for name, value in shared.items()},
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
                with open(f"{folder}/{rank}.out", "w") as out, open(f"{folder}/{rank}.err", "w") as err:
                    command = [sys.executable, "-m", "unishard.tools.doctor.ranks"]
                    processes.append(
                        subprocess.Popen(command, env=environ, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
                    )
            return _collected(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _collected(processes: list[subprocess.Popen[bytes]], folder: str) -> list[Check]:
    deadline = time.monotonic() + _SECONDS
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return [
                Check(
                    "ranks",
                    Status.FAIL,
                    f"rank {rank} did not end within {_SECONDS:.0f} s",
                    "run it again on an idle machine",
                )
            ]
    found: list[Check] = []
    for rank, process in enumerate(processes):
        with open(f"{folder}/{rank}.out") as out, open(f"{folder}/{rank}.err", errors="replace") as err:
            text, errors = out.read(), err.read()
        try:
            found += [Check(**{**each, "status": Status(each["status"])}) for each in json.loads(text)]
        except ValueError:
            last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            return [Check("ranks", Status.FAIL, f"rank {rank} failed: {last}", "repair what the message names")]
    return found
