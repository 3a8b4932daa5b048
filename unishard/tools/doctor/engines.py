"""Checks whether each backend can be used, and whether its engine still has the private names that rare cases need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unishard.contract import registry
from unishard.contract.backend import Backend
from unishard.contract.private_api import PrivateApi
from unishard.errors import BackendError
from unishard.tools.doctor.check import Check, Status, one_line, quietly


def found() -> tuple[list[Backend], list[Check]]:
    """The backends that can be imported, and a line for each that cannot."""
    try:
        points = registry.available()
    except BackendError as error:
        what, _, instead = str(error).partition("; ")
        return [], [Check("backends", Status.FAIL, what, instead)]
    usable, broken = [], []
    for name, point in points.items():
        try:
            usable.append(registry.get(name))
        except Exception as error:  # a third party's backend can raise anything
            owner = point.dist.name if point.dist else "unishard"
            broken.append(
                Check(f"backend {name}", Status.FAIL, f"cannot be imported: {one_line(error)}", f"reinstall {owner}")
            )
    return usable, broken


def backends(usable: Sequence[Backend], broken: Collection[str]) -> Iterator[Check]:
    """One line for each backend.

    Args:
        usable: The backends that can be imported.
        broken: Packages that cannot be imported.
    """
    for backend in usable:
        name, lacking = f"backend {backend.name}", sorted(set(backend.requires) & set(broken))
        if install := registry.missing(backend):
            yield Check(name, Status.WARN, "cannot train: its packages are not installed", install)
        elif lacking:
            yield Check(
                name,
                Status.WARN,
                f"cannot train: {', '.join(lacking)} cannot be imported",
                f"repair {', '.join(lacking)}",
            )
        else:
            yield Check(name, Status.OK, "ready")


def probes(tables: Mapping[str, Mapping[str, PrivateApi]], unusable: Collection[str]) -> Iterator[Check]:
    """One line for each case that needs private names.

    Args:
        tables: The patches of each backend, and of the core.
        unusable: Packages that are not installed or cannot be imported.
    """
    for owner, table in tables.items():
        for patch in table.values():
            name, case = f"probe {owner} {patch.name}", patch.case.rstrip(",")
            details = {
                "owner": owner,
                "case": case,
                "names": list(patch.names),
                "versions": patch.versions,
                "missing": None,
            }
            if patch.package in unusable:
                found = f"not run, since {patch.package} cannot be imported: {case}"
                yield Check(name, Status.OK, found, details=details)
            else:
                yield _probe(name, patch, case, details)


def _probe(name: str, patch: PrivateApi, case: str, details: dict[str, Any]) -> Check:
    try:
        with quietly():
            needed, missing = patch.needed, patch.missing()
    except Exception as error:  # importing the module of a private name raised something other than ImportError
        return Check(name, Status.WARN, f"{case}: the probe raised {one_line(error)}", patch.instead, details)
    details["missing"] = list(missing)
    if missing:
        return Check(
            name, Status.WARN, f"{case}: {patch.package} no longer has {', '.join(missing)}", patch.instead, details
        )
    return Check(name, Status.OK, case if needed else f"{case}: {patch.package} does it itself", details=details)
