"""Find backends and formats by entry point, both built-in and third-party."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import Distribution, EntryPoint, EntryPoints, distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unishard.config.hints import BACKENDS
from unishard.errors import BackendError

if TYPE_CHECKING:
    from unishard.contract.backend import Backend
    from unishard.contract.engine_arguments import EngineArguments

GROUP = "unishard.backends"
"""The group of entry points that backends stand in."""
FORMATS = "unishard.formats"
"""The group of those that formats stand in."""
ARGUMENTS = "unishard.arguments"
"""The group of those that the engines' own arguments stand in."""

_KINDS = {GROUP: "backend", FORMATS: "format", ARGUMENTS: "arguments of a backend"}


@cache
def available(group: str = GROUP) -> dict[str, EntryPoint]:
    """What is installed in an entry point group by name, without importing it.

    Raises:
        BackendError: Two distributions offer the same name.
    """
    installed = {name: points.select(group=group) for name, points in _installed().items()}
    entry_points = [point for points in installed.values() for point in points]
    return select(entry_points if installed.get("unishard") else [*entry_points, *_checkout(group)])


@cache
def _installed() -> Mapping[str, EntryPoints]:
    """The entry points of each distribution that offers a backend or a format.

    `importlib.metadata.entry_points` would parse those of every distribution, and `EntryPoint.dist.name` parses a whole
    README at each call: together several times as long.
    """
    offering = dict.fromkeys(one.name for one in distributions() if _offers(one))
    # `distribution` returns the first one on the path, which is the one that is imported.
    return {name: distribution(name).entry_points for name in offering}


def _offers(candidate: Distribution) -> bool:
    text = candidate.read_text("entry_points.txt") or ""
    return any(group in text for group in _KINDS)


def select(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    """Entry points by name.

    Raises:
        BackendError: Two distributions offer the same name.
    """
    selected: dict[str, EntryPoint] = {}
    for point in points:
        first = selected.setdefault(point.name, point)
        # A distribution's own point is compared only with another one: asking for its name parses its metadata.
        if first is not point and (_distribution(first), first.value) != (_distribution(point), point.value):
            raise BackendError(
                f"{_KINDS[point.group]} {point.name!r} is offered twice: {first.value} by {_distribution(first)} and "
                f"{point.value} by {_distribution(point)}; uninstall one of the two"
            )
    return dict(sorted(selected.items()))


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "this checkout"


def _checkout(group: str) -> list[EntryPoint]:
    """The entry points in `pyproject.toml`, so that a checkout works without installation."""
    root = Path(__file__).resolve().parents[2]
    project = root / "pyproject.toml"
    if not project.is_file():
        return []
    import tomllib  # only a checkout that is not installed needs it

    if str(root / "backends") not in sys.path:
        sys.path.append(str(root / "backends"))
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][group]
    return [EntryPoint(name, value, group) for name, value in table.items()]


@cache
def load(group: str, name: str) -> Any:
    """What stands in a group under a name. Imports its module.

    Raises:
        BackendError: There is nothing of this name.
    """
    points = available(group)
    if name not in points:
        near = get_close_matches(name, points, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if group == GROUP and name in BACKENDS:
            hint = f"{BACKENDS[name]}; "
        raise BackendError(f"no {_KINDS[group]} named {name!r}; {hint}installed: {', '.join(points) or 'none'}")
    return points[name].load()


def source_of(name: str) -> str:
    """The distribution that offers a backend."""
    point = available()[name]
    return f"{point.dist.name} {point.dist.version}" if point.dist else "this checkout"


def get(name: str) -> Backend:
    """The backend with this name. Imports its translator, not its engine.

    Raises:
        BackendError: There is no such backend.
    """
    return cast("Backend", load(GROUP, name))


def arguments(name: str) -> EngineArguments:
    """The own arguments of the engine of this backend.

    Raises:
        BackendError: Nothing installed reads them.
    """
    return cast("EngineArguments", load(ARGUMENTS, name))


def missing(backend: Backend) -> str | None:
    """The command that installs what `prepare` lacks; None if nothing is missing."""
    extras = [extra for package, extra in backend.requires.items() if find_spec(package) is None]
    return f"pip install 'unishard[{','.join(dict.fromkeys(extras))}]'" if extras else None
