"""Runs all checks, in the order of the report; some on ranks that it starts on this host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from unishard.config.rendezvous import rendezvous
from unishard.config.topology import Topology
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.contract.tested_versions import tested
from unishard.errors import ConfigError, in_parts
from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.devices import devices
from unishard.tools.doctor.local_ranks import local_ranks
from unishard.tools.doctor.packages import backends, found, packages, probes, python


def examine(ranks: int | None = None, directory: Path | None = None) -> Iterator[Check]:
    """Run all checks. Imports the installed engines.

    Args:
        ranks: So many processes are started on this host, and connected.
        directory: Of `offload.nvme_path`, whose disk is measured.
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
    if directory is not None and "torch" not in unusable:
        yield import_module("unishard.tools.doctor.disk").disk(directory)
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
    checks: list[Check] = import_module("unishard.tools.doctor.ranks").connections(topology)
    return checks


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
        return Check("launcher", Status.FAIL, in_parts(str(error))[0], instead)
    if topology.launcher == "python":
        return Check("launcher", Status.OK, "none; one rank")
    return Check("launcher", Status.OK, f"{topology.launcher}, rank {topology.rank} of {topology.world_size}")
