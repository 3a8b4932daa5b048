"""Checks Python and the packages that unishard needs or can use: version, whether it was tested, and whether it can be
imported.
"""

from __future__ import annotations

import platform
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, requires
from typing import Any

from unishard.contract import registry
from unishard.contract.backend import Backend
from unishard.contract.private_api import PrivateApi
from unishard.contract.tested_versions import PYTHONS, is_tested, span
from unishard.errors import BackendError, in_parts
from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.imports import failure, one_line, quietly

PACKAGES = {
    "pydantic": "",
    "ruamel.yaml": "",
    "typer": "",
    "rich": "",
    "torch": "torch",
    "numpy": "torch",
    "deepspeed": "deepspeed",
    "transformers": "hf",
    "peft": "hf",
    "safetensors": "hf",
    "lion-pytorch": "optimizers",
    "bitsandbytes": "quantization",
    "accelerate": "accelerate",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow-skinny": "mlflow",
    "sqlalchemy": "mlflow",
    "alembic": "mlflow",
    "lightning": "lightning",
    "ray": "ray",
    "matplotlib": "demo",
}
"""Distributions that unishard imports, to the extra that installs each; empty for required ones."""


def python() -> Check:
    """Check the interpreter."""
    version = platform.python_version()
    details = {"version": version, "tested": is_tested(version, PYTHONS)}
    if details["tested"]:
        return Check("python", Status.OK, f"{version}, tested", details=details)
    if sys.version_info < tuple(map(int, PYTHONS[0].split("."))):
        return Check("python", Status.FAIL, f"{version}, too old", f"install Python {PYTHONS[0]} or newer", details)
    return Check("python", Status.WARN, f"{version}, not tested", f"use Python {span(PYTHONS)}", details)


def versions() -> dict[str, list[tuple[str, str]]]:
    """Versions and locations of every installed distribution by lower-case name, the one that Python imports first."""
    installed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        place = (distribution.version, str(distribution.locate_file("")))
        if place not in installed[name]:
            installed[name].append(place)
    return installed


def packages(tested: Mapping[str, Sequence[str]], engines: Mapping[str, str]) -> Iterator[Check]:
    """One line for each package.

    Args:
        tested: Versions that were tested, by package.
        engines: Import name of each package that a backend needs, to the extra that installs it. These are imported.
    """
    installed, floors = versions(), _floors()
    for name in dict.fromkeys((*PACKAGES, *engines, *tested)):
        copies = installed.get(name, [])
        if not copies:
            yield _absent(name, engines)
            continue
        version, place = copies[0]
        details = {"version": version, "tested": is_tested(version, tested[name]) if name in tested else None}
        if name in engines and (error := failure(name)):
            yield Check(
                name, Status.FAIL, f"{version} at {place} cannot be imported: {error}", f"reinstall {name}", details
            )
        elif len({one for one, _ in copies}) > 1:
            places = ", ".join(f"{one} in {where}" for one, where in copies)
            yield Check(
                name, Status.WARN, f"installed twice: {places}; the first is used", f"uninstall one {name}", details
            )
        elif name in floors and _older(version, floors[name]):
            needs = f"{version}, older than unishard needs"
            yield Check(name, Status.WARN, needs, f"pip install --upgrade '{name}>={floors[name]}'", details)
        elif details["tested"] is False:
            yield Check(name, Status.WARN, f"{version}, not tested", f"tested: {span(tested[name])}", details)
        else:
            yield Check(name, Status.OK, f"{version}, tested" if details["tested"] else version, details=details)


def _absent(name: str, engines: Mapping[str, str]) -> Check:
    extra = engines.get(name) or PACKAGES.get(name)
    install = f"pip install 'unishard[{extra}]'" if extra else f"pip install {name}"
    # Without torch no backend of any kind prepares a model.
    status = Status.FAIL if name == "torch" else Status.WARN if name in engines else Status.OK
    instead = install if name in engines else f"optional: {install}"
    return Check(name, status, "not installed", instead, {"version": None, "tested": None})


def _floors() -> dict[str, str]:
    """The minimum versions in unishard's own metadata, by package; empty in a bare checkout."""
    try:
        requirements = requires("unishard") or []
    except PackageNotFoundError:
        return {}
    matches = (
        re.match(r"([\w.-]+)>=([\d.]+)", text) for text in requirements if "'dev'" not in text and '"dev"' not in text
    )
    return {match[1].lower(): match[2] for match in matches if match}


def _older(version: str, floor: str) -> bool:
    """Whether a version is below a minimum, compared by its numbers."""

    def numbers(text: str) -> list[int]:
        return [int(part[0]) if (part := re.match(r"\d+", one)) else 0 for one in text.split(".")]

    return numbers(version) < numbers(floor)


# Checks whether each backend can be used, and whether its engine still has the private names that rare cases need.


def found() -> tuple[list[Backend], list[Check]]:
    """The backends that can be imported, and a line for each that cannot."""
    try:
        points = registry.available()
    except BackendError as error:
        problem, instead = in_parts(str(error))
        return [], [Check("backends", Status.FAIL, problem, instead)]
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
            yield Check(name, Status.OK, f"ready, from {registry.source_of(backend.name)}")


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
                result = f"not run, since {patch.package} cannot be imported: {case}"
                yield Check(name, Status.OK, result, details=details)
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
