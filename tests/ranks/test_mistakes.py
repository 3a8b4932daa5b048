"""Each mistake of docs/mistakes.md: the same clear error on every rank, or no harm, and no hang.

`make mistakes` makes each on both engines; here the engines take turns.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mistakes import SUBJECTS
from mistakes.mistake import Elsewhere, Mistake
from mistakes.page import page
from playing import error, play, values

from unishard.testing.cells import BACKENDS

ROOT = Path(__file__).parents[2]
MISTAKES = [mistake for subject in SUBJECTS for mistake in subject.played()]
IN_TURNS = [(BACKENDS[(number + number // 2) % 2], mistake) for number, mistake in enumerate(MISTAKES)]
OTHERS = [(backend, mistake) for mistake in MISTAKES for backend in BACKENDS if (backend, mistake) not in IN_TURNS]
ELSEWHERE = [row for subject in SUBJECTS for row in subject.rows if isinstance(row, Elsewhere)]


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
        assert mistake.matches(raised), f"raised {raised!r}\nexpected {mistake.outcome!r}"


@pytest.mark.parametrize(("backend", "mistake"), IN_TURNS, ids=_name)
def test_a_mistake_is_one_clear_error_on_every_rank_or_does_no_harm(backend, mistake):
    _made(IN_TURNS, backend, mistake)


@pytest.mark.deep
@pytest.mark.parametrize(("backend", "mistake"), OTHERS, ids=_name)
def test_it_is_so_on_the_other_engine(backend, mistake):
    _made(OTHERS, backend, mistake)


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.test.rpartition("::")[2])
def test_the_test_of_a_mistake_that_is_tested_elsewhere_exists(row):
    file, _, function = row.test.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text()


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/mistakes.md").read_text() == page(), "run `make mistakes` and commit docs/mistakes.md"
