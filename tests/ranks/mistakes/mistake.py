"""Mistakes that people make, and what unishard does about each on both engines: the rows of docs/mistakes.md, and of
rarer.md beside this file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dev.pages.rows import rows

__all__ = ["ELSEWHERE", "MISTAKES", "OUTCOMES", "Mistake", "elsewhere", "mistake"]

Scenario = Callable[..., Any]
_PAGES = ("mistakes.md", str(Path(__file__).with_name("rarer.md")))
OUTCOMES: dict[str, str] = {what: outcome for page in _PAGES for _, (what, outcome) in rows(page)}
"""By mistake, what comes of it: the message as `Type: text`, where `...` stands for what differs between runs; or,
where it does no harm, what happens."""


class Mistake(NamedTuple):
    """A mistake that every rank makes."""

    what: str
    """Its row."""
    scenario: Scenario
    """Makes it: called on each rank with the backend and `arguments`. Where it does no harm, it returns what it got and
    what is right: numbers, or lists of them."""
    arguments: tuple[Any, ...]

    @property
    def harmless(self) -> bool:
        """Whether the scenario raises nothing."""
        return re.match(r"\w+(Error|Warning): ", OUTCOMES[self.what]) is None

    def matches(self, raised: str) -> bool:
        """Whether a rank raised what the page says."""
        return re.fullmatch("(?s:.*)".join(map(re.escape, OUTCOMES[self.what].split("..."))), raised) is not None


MISTAKES: list[Mistake] = []
ELSEWHERE: dict[str, str] = {}
"""By mistake that needs a test of its own, such as one that ends a rank: that, as `tests/ranks/test_x.py::test_y`."""


def mistake(what: str, *arguments: Any) -> Callable[[Scenario], Scenario]:
    """Let a scenario make the mistake of a row."""

    def add(scenario: Scenario) -> Scenario:
        MISTAKES.append(Mistake(what, scenario, arguments))
        return scenario

    return add


def elsewhere(what: str, test: str) -> None:
    """Name the test of a row."""
    ELSEWHERE[what] = test
