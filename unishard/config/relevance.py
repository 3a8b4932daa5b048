"""Marks on fields that decide nothing under some configs: said once, for every table and every report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class UnusedIf:
    """Marks a field, or all fields of a section, that decide nothing because something else is off."""

    holds: Callable[[Any], bool]
    """Of the whole config."""
    why: str


@dataclass(frozen=True, slots=True)
class OffAt:
    """Marks a field that asks for nothing at this value."""

    value: Any
