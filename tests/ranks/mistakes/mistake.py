"""A mistake that people make, and what unishard does about it: a row of docs/mistakes.md, and a test on both
engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["Elsewhere", "Mistake", "Mistakes"]

Scenario = Callable[..., Any]


class Mistake(NamedTuple):
    """A mistake that every rank makes, and what comes of it."""

    what: str
    """What people write, as Markdown."""
    outcome: str
    """The message as `Type: text`, where `...` stands for what differs between runs; or, where it does no harm, what
    happens."""
    scenario: Scenario
    """Makes the mistake: called on each rank with the backend and `arguments`."""
    arguments: tuple[Any, ...]
    harmless: bool
    """Whether the scenario raises nothing and returns what it got and what is right: numbers, or lists of them."""

    def matches(self, raised: str) -> bool:
        """Whether a rank raised what `outcome` says."""
        return re.fullmatch("(?s:.*)".join(map(re.escape, self.outcome.split("..."))), raised) is not None


class Elsewhere(NamedTuple):
    """A mistake that needs a test of its own, such as one that ends a rank, or one that an engine cannot see."""

    what: str
    outcome: str
    """What happens, or the message."""
    test: str
    """The function that tests it, as `tests/ranks/test_x.py::test_y`."""


class Mistakes:
    """The mistakes of one subject: a section of the page."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Mistake | Elsewhere] = []

    def raises(self, what: str, outcome: str, *arguments: Any) -> Callable[[Scenario], Scenario]:
        """Add a scenario that ends in an error of unishard, the same on every rank of both engines."""
        return self._adder(what, outcome, arguments, harmless=False)

    def harmless(self, what: str, outcome: str, *arguments: Any) -> Callable[[Scenario], Scenario]:
        """Add a scenario that returns `(got, right)`, which agree on both engines."""
        return self._adder(what, outcome, arguments, harmless=True)

    def elsewhere(self, what: str, outcome: str, test: str) -> None:
        """Add a row that another test holds."""
        self.rows.append(Elsewhere(what, outcome, test))

    def played(self) -> Iterator[Mistake]:
        """The rows that have a scenario."""
        return (row for row in self.rows if isinstance(row, Mistake))

    def _adder(
        self, what: str, outcome: str, arguments: tuple[Any, ...], *, harmless: bool
    ) -> Callable[[Scenario], Scenario]:
        def add(scenario: Scenario) -> Scenario:
            self.rows.append(Mistake(what, outcome, scenario, arguments, harmless))
            return scenario

        return add
