"""Starts ranks for a test, or for many scenarios that share them, so that a test costs its own work and not a start."""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import os
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from _pytest.assertion import install_importhook, util
from _pytest.config import get_config

from harness.training import DEEP
from unishard.testing import RankFailure, run_ranks
from unishard.testing.cells import BACKENDS

Act = Callable[..., Any]
Plays = tuple[tuple[Act, tuple[Any, ...]], ...]
"""Functions and their arguments."""


class Outcome(NamedTuple):
    """What a scenario returned on one rank, or what it raised."""

    value: Any
    error: tuple[str, str] | None
    where: str = ""


def play(scenarios: Plays, world: int = 2) -> dict[tuple[Act, tuple[Any, ...]], list[Outcome]]:
    """Outcomes by rank of each (function, arguments). The same scenarios are played once."""
    played = _played(scenarios, world)
    if isinstance(played, RankFailure):
        raise played
    return {scenario: [outcomes[index] for outcomes in played] for index, scenario in enumerate(scenarios)}


@functools.cache
def _played(scenarios: Plays, world: int) -> list[list[Outcome]] | RankFailure:
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


class _Cell(NamedTuple):
    """A test in the ranks with its arguments: its function by name, which is that of the test here."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    root: str

    def __call__(self) -> None:
        body = getattr(importlib.import_module(self.module), self.name).body
        with pytest.MonkeyPatch.context() as patch:
            offered = {"root": self.root, "monkeypatch": patch}
            asked = {name: offered[name] for name in offered if name in inspect.signature(body).parameters}
            if "root" in asked:
                os.makedirs(self.root, exist_ok=True)
            body(*self.arguments, **asked)


_CELLS: dict[tuple[str, int], list[_Cell]] = collections.defaultdict(list)
"""By module and number of ranks; their roots are relative."""


def in_ranks(body: Act | None = None, *, world: int = 2, cells: tuple[Any, ...] = ((),), in_turn: bool = False) -> Any:
    """Make a test of a function that runs in the ranks, and asserts there.

    The same ranks play all tests of a module that are chosen. A rank that raises alone leaves the others waiting, so
    asserts stand at the end; what was broken by another test is played again alone.

    Args:
        body: The function. It may take `root`, a folder of its own, and `monkeypatch`.
        world: Number of ranks.
        cells: Arguments of which each makes a test.
        in_turn: Whether no engine decides what is tested: of cells that differ only in their first argument, the
            engine, one remains without `--deep`.
    """
    if body is None:
        return functools.partial(in_ranks, world=world, cells=cells, in_turn=in_turn)
    if in_turn and not DEEP:
        cells = _of_one_engine(body.__name__, cells)
    every = _CELLS[body.__module__, world]
    own = {
        cell: _Cell(body.__module__, body.__qualname__, cell, f"{body.__module__}/{world}/{number}")
        for number, cell in enumerate(cells, len(every))
    }
    every += own.values()

    def test(request: pytest.FixtureRequest, cell: tuple[Any, ...]) -> None:
        folder = request.getfixturevalue("tmp_path_factory").getbasetemp()
        names = {getattr(item, "originalname", "") for item in request.session.items}
        mine, *others = (
            (each._replace(root=str(folder / each.root)), ()) for each in (own[cell], *every) if each.name in names
        )
        try:
            played = play(tuple(others), world)
        except RankFailure:
            played = play((mine,), world)
        values(played[mine])

    def without_arguments(request: pytest.FixtureRequest) -> None:
        test(request, ())

    made: Any = without_arguments if cells == ((),) else test
    functools.update_wrapper(made, body, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    del made.__wrapped__  # pytest looks at the arguments of that
    made.body = body
    if cells == ((),):
        return made
    return pytest.mark.parametrize("cell", cells, ids=lambda cell: "-".join(map(str, cell)))(made)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; fails with what one raised."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank} raised {': '.join(outcome.error)}\n{outcome.where}"
    return [outcome.value for outcome in outcomes]


def of_all_ranks(value: Any) -> list[Any]:
    """A value of each rank, on all of them. Collective."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def on_ranks(scenario: Act, *arguments: Any, world: int = 2) -> list[Any]:
    """What every rank returned of a scenario that is played alone."""
    return values(play(((scenario, arguments),), world)[scenario, arguments])


def raised(scenario: Act, *arguments: Any, world: int = 2) -> str:
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
