"""Versions of the packages that are installed. Imports none of them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def version_of(package: str) -> str:
    """Version of an installed distribution without its local label; `not installed` if there is none."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"
