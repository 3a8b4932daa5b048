"""Tested versions of Python and of the packages that backends depend on. Imports no engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from unishard.contract.backend import Backend
from unishard.contract.installed import version_of

PYTHONS = ("3.11", "3.12", "3.13")
"""Tested versions of Python, oldest first; pip refuses older ones."""

_logger = logging.getLogger("unishard")
_said: set[str] = set()
"""Warnings already logged in this process, so that a second model does not repeat them."""


def is_tested(version: str, versions: Iterable[str]) -> bool:
    """Whether a version starts with a tested one, number by number: 2.11.1 matches 2.11 but not 2.1."""
    numbers = version.partition("+")[0].split(".")
    return any(numbers[: len(prefix)] == prefix for prefix in (one.split(".") for one in versions))


def tested(backends: Iterable[Backend]) -> dict[str, tuple[str, ...]]:
    """For each package, the versions tested with every backend that needs it, oldest first."""
    versions_of: dict[str, tuple[str, ...]] = {}
    for backend in backends:
        for package, versions in backend.tested.items():
            versions_of[package] = tuple(one for one in versions_of.get(package, versions) if one in versions)
    return versions_of


def span(versions: Sequence[str]) -> str:
    """Format versions as a range (`2.11 to 2.13`), or as a list if there are gaps."""
    last = [int(version.rpartition(".")[2]) for version in versions]
    if len(versions) > 1 and last == list(range(last[0], last[0] + len(last))):
        return f"{versions[0]} to {versions[-1]}"
    return ", ".join(versions) or "none"


def untested(backend: Backend) -> str:
    """A warning if a package of the backend has an untested version; empty if none has."""
    odd = [
        f"{package} {version} was not tested with backend {backend.name} (tested: {span(versions)})"
        for package, versions in backend.tested.items()
        if not is_tested(version := version_of(package), versions)
    ]
    return f"{'; '.join(odd)}; run `unishard doctor` to check this environment" if odd else ""


def warn_if_untested(backend: Backend, rank: int) -> None:
    """Log one line on rank 0 if a package of the backend has an untested version."""
    message = untested(backend)
    if message and rank == 0 and message not in _said:
        _said.add(message)
        _logger.warning(message)
