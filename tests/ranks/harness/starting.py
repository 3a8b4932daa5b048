"""Starts ranks for a test, or for many scenarios that share them, so that a test costs its own work and not a start."""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.assertion import install_importhook, util
from _pytest.config import get_config

from harness.training import DEEP
from unishard.testing import RankFailure, run_ranks
from unishard.testing.cells import BACKENDS

Scenario = Callable[..., Any]
Scenarios = tuple[tuple[Scenario, tuple[Any, ...]], ...]
"""Functions and their arguments."""


class Outcome(NamedTuple):
    """What a scenario returned on one rank, or what it raised."""

    value: Any
    error: tuple[str, str] | None
    where: str = ""


def play(scenarios: Scenarios, world: int = 2) -> dict[tuple[Scenario, tuple[Any, ...]], list[Outcome]]:
    """Outcomes by rank of each (function, arguments). The same scenarios are played once."""
    played = _played(scenarios, world)
    if isinstance(played, RankFailure):
        raise played
    return {scenario: [outcomes[index] for outcomes in played] for index, scenario in enumerate(scenarios)}


@functools.cache
def _played(scenarios: Scenarios, world: int) -> list[list[Outcome]] | RankFailure:
    try:
        return run_ranks(world, _play, pickle.dumps(scenarios), timeout=120 + 5 * len(scenarios))
    except RankFailure as failure:
        return failure


def _play(scenarios: bytes) -> list[Outcome]:
    outcomes = []
    for function, arguments in _read(scenarios):
        try:
            outcomes.append(Outcome(function(*arguments), None))
        except Exception as error:
            outcomes.append(Outcome(None, (type(error).__name__, str(error)), traceback.format_exc()))
    return outcomes


def _read(sent: bytes) -> Any:
    """What was sent, after pytest has seen to it that the asserts of the modules that it comes from say what differs."""
    config = get_config()
    install_importhook(config)
    util._reprcompare = _difference
    return pickle.loads(sent)


def _difference(operator: str, left: object, right: object) -> str | None:
    lines = util.assertrepr_compare(
        operator, left, right, verbose=1, highlighter=lambda text, lexer="": text, assertion_text_diff_style="ndiff"
    )
    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None


class _Body(NamedTuple):
    """The function of a test that runs in the ranks, by its name, which is that of the test here."""

    module: str
    name: str

    def __call__(self, *arguments: Any, **named: Any) -> None:
        getattr(importlib.import_module(self.module), self.name).body(*arguments, **named)


_TOGETHER: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
"""By module and number of ranks, the tests that name cells: their functions, cells, and whether they take a folder."""


def in_ranks(
    body: Scenario | None = None, *, world: int = 2, cells: tuple[Any, ...] = (), in_turn: bool = False
) -> Any:
    """Make a test of a function that runs in the ranks, and asserts there. Its fixtures must be able to travel.

    Args:
        body: The function.
        world: Number of ranks.
        cells: Arguments of which each makes a test; behind them the function may take `root`, a folder for all. The
            same ranks play all cells that are chosen of a module: a rank must not raise alone where the others wait for
            it, so asserts stand at the end.
        in_turn: Whether no engine decides what is tested: of cells that differ only in their first argument, the
            engine, one remains without `--deep`.
    """
    if body is None:
        return functools.partial(in_ranks, world=world, cells=cells, in_turn=in_turn)
    if in_turn and not DEEP:
        cells = _of_one_engine(body.__name__, cells)
    scenario = _Body(body.__module__, body.__qualname__)

    def alone(**fixtures: Any) -> None:
        run_ranks(world, _assert, pickle.dumps((scenario, fixtures)))

    def with_others(cell: tuple[Any, ...], request: pytest.FixtureRequest) -> None:
        root = str(request.getfixturevalue("tmp_path_factory").getbasetemp() / body.__module__)
        chosen = {getattr(item, "originalname", "") for item in request.session.items}
        played = play(
            tuple((each, (*given, *[root] * more)) for each, given, more in together if each.name in chosen), world
        )
        values(played[scenario, (*cell, *[root] * takes_root)])

    takes_root = "root" in inspect.signature(body).parameters
    together = _TOGETHER[body.__module__, world]
    together += [(scenario, cell, takes_root) for cell in cells]
    if cells:
        test = functools.wraps(body, assigned=("__module__", "__name__", "__qualname__", "__doc__"))(with_others)
        del test.__wrapped__
        test = pytest.mark.parametrize("cell", cells, ids=lambda cell: "-".join(map(str, cell)))(test)
    else:
        test = functools.wraps(body)(alone)
    test.body = body
    return test


def _assert(sent: bytes) -> None:
    body, fixtures = _read(sent)
    body(**fixtures)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; fails with what one raised."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} raised {': '.join(outcome.error)}\n{outcome.where}"
    return [outcome.value for outcome in outcomes]


def on_ranks(scenario: Scenario, *arguments: Any, world: int = 2) -> list[Any]:
    """What every rank returned of a scenario that is played alone."""
    return values(play(((scenario, arguments),), world)[scenario, arguments])


def raised(scenario: Scenario, *arguments: Any, world: int = 2) -> str:
    """`Type: message` that every rank raised in a scenario that is played alone."""
    return error(play(((scenario, arguments),), world)[scenario, arguments])


def error(outcomes: list[Outcome]) -> str:
    """`Type: message` that every rank raised."""
    raised = [outcome.error for outcome in outcomes]
    assert None not in raised, f"not every rank raised: {raised}"
    assert len(set(raised)) == 1, f"the ranks raised different errors: {raised}"
    return ": ".join(raised[0])


def _turn(name: str) -> int:
    """A number that is the same in each process."""
    return zlib.crc32(name.encode())


def _of_one_engine(name: str, cells: tuple[Any, ...]) -> tuple[Any, ...]:
    others = collections.defaultdict(list)
    for cell in cells:
        others[str(cell[1:])].append(cell)
    return tuple(each[(_turn(name) + number) % len(each)] for number, each in enumerate(others.values()))


def in_turn(test: Callable[..., None]) -> Any:
    """Parametrize a test of what no engine decides by the backend: it takes one of them, `--deep` the other too."""
    first = _turn(test.__name__) % len(BACKENDS)
    marks = [[], [pytest.mark.deep]]
    chosen = [pytest.param(each, marks=marks[number != first]) for number, each in enumerate(BACKENDS)]
    return pytest.mark.parametrize("backend", chosen)(test)


def run_script(path: str | Path, *words: str) -> None:
    """Be a script, in this process: importing costs more than the rest."""
    sys.argv = [str(path), *words]
    exec(
        compile(Path(path).read_text(encoding="utf-8"), str(path), "exec"),
        {"__name__": "__main__", "__file__": str(path)},
    )
