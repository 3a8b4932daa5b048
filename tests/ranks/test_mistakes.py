"""Each mistake of docs/mistakes.md: the same clear error on every rank of both engines, or no harm, and no hang."""

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
ELSEWHERE = [row for subject in SUBJECTS for row in subject.rows if isinstance(row, Elsewhere)]


def _name(mistake: Mistake) -> str:
    return "-".join((mistake.scenario.__name__, *(str(argument)[:80] for argument in mistake.arguments)))


@pytest.mark.parametrize("mistake", MISTAKES, ids=_name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mistake_is_one_clear_error_on_every_rank_or_does_no_harm(backend, mistake):
    outcomes = play(tuple((each.scenario, (backend, *each.arguments)) for each in MISTAKES))[
        mistake.scenario, (backend, *mistake.arguments)
    ]
    if mistake.harmless:
        for got, right in values(outcomes):
            assert got == pytest.approx(right, rel=1e-5)
    else:
        raised = error(outcomes)
        assert mistake.matches(raised), f"raised {raised!r}\nexpected {mistake.outcome!r}"


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.test.rpartition("::")[2])
def test_the_test_of_a_mistake_that_is_tested_elsewhere_exists(row):
    file, _, function = row.test.partition("::")
    assert f"def {function}(" in (ROOT / file).read_text()


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/mistakes.md").read_text() == page(), "run `make mistakes` and commit docs/mistakes.md"
