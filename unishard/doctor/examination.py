"""Runs all checks, in the order of the report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from unishard.config.topology import Topology, rendezvous
from unishard.doctor import engines
from unishard.doctor.check import Check, Status
from unishard.doctor.devices import devices
from unishard.doctor.packages import packages, python
from unishard.errors import ConfigError
from unishard.patches import CORE_PATCHES
from unishard.plugins.tested_versions import tested

__all__ = ["examine", "worst"]


def examine() -> Iterator[Check]:
    """Run all checks. Imports the installed engines."""
    yield python()
    usable, unreadable = engines.found()
    needed = {"torch": "torch"} | {package: extra for backend in usable for package, extra in backend.requires.items()}
    lines = list(packages(tested(usable), needed))
    yield from lines
    # Packages that are not installed or cannot be imported are not checked further.
    unusable = {line.name for line in lines if line.name in needed and (line.status == Status.FAIL or line.details["version"] is None)}
    yield from unreadable
    yield from engines.backends(usable, unusable)
    yield from engines.probes({"unishard": CORE_PATCHES} | {backend.name: backend.patches for backend in usable}, unusable)
    if "torch" not in unusable:
        yield from devices()
    yield _launcher(os.environ)


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
