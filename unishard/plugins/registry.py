"""Find backends by the entry point group `unishard.backends`, both built-in and third-party."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from unishard.errors import BackendError
from unishard.plugins.backend import Backend

__all__ = ["GROUP", "available", "get", "missing", "select"]

GROUP = "unishard.backends"


@cache
def available() -> dict[str, EntryPoint]:
    """The installed backends by name, without importing them.

    Raises:
        BackendError: Two distributions offer the same name.
    """
    installed = entry_points(group=GROUP)
    own = any(_distribution(point) == "unishard" for point in installed)
    return select(installed if own else [*installed, *_checkout()])


def select(points: Iterable[EntryPoint]) -> dict[str, EntryPoint]:
    """Entry points by name.

    Raises:
        BackendError: Two distributions offer the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in points:
        other = found.setdefault(point.name, point)
        # An editable install beside a wheel, or a duplicate path, yields the same entry point twice.
        if (_distribution(other), other.value) != (_distribution(point), point.value):
            raise BackendError(
                f"backend {point.name!r} is offered twice: {other.value} by {_distribution(other)} and {point.value} by "
                f"{_distribution(point)}; uninstall one of the two"
            )
    return dict(sorted(found.items()))


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "this checkout"


def _checkout() -> list[EntryPoint]:
    """The entry points in `pyproject.toml`, so that a checkout works without installation."""
    root = Path(__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    if not project.is_file():
        return []
    sys.path.append(str(root / "backends"))
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    return [EntryPoint(name, value, GROUP) for name, value in table.items()]


@cache
def get(name: str) -> Backend:
    """The backend with this name. Imports its translator, not its engine.

    Raises:
        BackendError: There is no such backend.
    """
    points = available()
    if name not in points:
        near = get_close_matches(name, points, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(points) or 'none'}"
        raise BackendError(f"no backend named {name!r}; {hint}")
    module, _, attribute = points[name].value.partition(":")
    return cast(Backend, getattr(import_module(module), attribute))


def missing(backend: Backend) -> str | None:
    """The command that installs what `prepare` lacks; None if nothing is missing."""
    extras = [extra for package, extra in backend.requires.items() if find_spec(package) is None]
    return f"pip install 'unishard[{','.join(dict.fromkeys(extras))}]'" if extras else None
