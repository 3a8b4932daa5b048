"""Marks on fields that decide nothing under some configs: said once, for every table, report, error and plan."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Not:
    """Every value but one."""

    value: Any

    def __contains__(self, value: Any) -> bool:
        return bool(value != self.value)


@dataclass(frozen=True, slots=True)
class Has:
    """Every list with one of some items."""

    items: tuple[Any, ...]

    def __contains__(self, value: Any) -> bool:
        return any(item in self.items for item in value)


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """Marks a field that decides nothing unless one of other fields, the switches, has one of some values."""

    when: Mapping[str, Container[Any]]
    """The values by switch: of a field beside it or, with a dot, of any other. The first of a tuple stands in for one
    that is not known yet."""
    why: str
    """Why it decides nothing otherwise."""
    refusal: str = ""
    """The error where a file sets it all the same, a template: `self` is what holds the field and its switches, the
    section or the config. Empty where it may be set."""

    def beside(self, path: str) -> OnlyWith:
        """It with the whole path of each switch, for the field at a path."""
        above, dot, _ = path.rpartition(".")
        return replace(self, when={name if "." in name else above + dot + name: self.when[name] for name in self.when})

    @property
    def listed(self) -> Mapping[str, tuple[Any, ...]]:
        """The switches whose values have an order."""
        return {switch: values for switch, values in self.when.items() if isinstance(values, tuple)}

    def is_met(self, value_of: Callable[[str], Any]) -> bool:
        """Whether it decides something, given the value of each switch."""
        return any(value_of(switch) in values for switch, values in self.when.items())


@dataclass(frozen=True, slots=True)
class OffAt:
    """Marks a field that asks for nothing at this value."""

    value: Any
