"""Each mistake of docs/mistakes.md: the same clear error on every rank, or no harm, and no hang.

`make mistakes` makes each on both engines; here the engines take turns.
"""

from __future__ import annotations

from pathlib import Path

import mistakes  # noqa: F401  # its modules fill the list
import pytest
from harness import BACKENDS, error, play, values
from mistakes.mistake import ELSEWHERE, MISTAKES, OUTCOMES, Mistake

ROOT = Path(__file__).parents[2]
IN_TURNS = [(BACKENDS[(number + number // 2) % 2], mistake) for number, mistake in enumerate(MISTAKES)]
OTHERS = [(backend, mistake) for mistake in MISTAKES for backend in BACKENDS if (backend, mistake) not in IN_TURNS]


def _name(value: str | Mistake) -> str:
    if isinstance(value, str):
        return value
    return "-".join((value.scenario.__name__, *(str(argument)[:80] for argument in value.arguments)))


def _made(some: list[tuple[str, Mistake]], backend: str, mistake: Mistake) -> None:
    scenarios = tuple((each.scenario, (on, *each.arguments)) for on, each in some)
    outcomes = play(scenarios)[mistake.scenario, (backend, *mistake.arguments)]
    if mistake.harmless:
        for got, right in values(outcomes):
            assert got == pytest.approx(right, rel=1e-5)
    else:
        raised = error(outcomes)
        assert mistake.matches(raised), f"raised {raised!r}\nexpected {OUTCOMES[mistake.what]!r}"


@pytest.mark.parametrize(("backend", "mistake"), IN_TURNS, ids=_name)
def test_a_mistake_is_one_clear_error_on_every_rank_or_does_no_harm(backend, mistake):
    _made(IN_TURNS, backend, mistake)


@pytest.mark.deep
@pytest.mark.parametrize(("backend", "mistake"), OTHERS, ids=_name)
def test_it_is_so_on_the_other_engine(backend, mistake):
    _made(OTHERS, backend, mistake)


@pytest.mark.parametrize("test", dict.fromkeys(ELSEWHERE.values()))
def test_the_test_of_a_mistake_that_is_tested_elsewhere_exists(test):
    file, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text()


def test_every_row_of_the_page_is_tested():
    assert {*OUTCOMES} == {*ELSEWHERE, *(mistake.what for mistake in MISTAKES)}
    assert len(OUTCOMES) == len(ELSEWHERE) + len(MISTAKES)
