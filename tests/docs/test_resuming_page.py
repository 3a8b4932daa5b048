"""docs/resuming.md lists every pair of runs, and no figure beyond its bound."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from dev import resuming
from dev.resuming import every_pair
from unishard.contract.tolerances import TOLERANCES
from unishard.testing.cells import BACKENDS, STRATEGIES
from unishard.testing.resuming import Resumption

PAGE = Path(__file__).parents[2] / "docs/resuming.md"
KINDS = [f"{backend} {strategy}" for backend, strategy in product(BACKENDS, STRATEGIES)]
PAIRS = [pair for precision in ("fp32", "bf16") for pair in every_pair(precision)]


def tables(text: str) -> dict[str, dict[str, list[str]]]:
    """By precision, what the page says of those that one kind of run saved."""
    found = {}
    for section in text.split("\n## ")[1:]:
        precision, *lines = section.splitlines()
        rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
        if precision in TOLERANCES:
            assert rows[0][1:] == KINDS
            found[precision] = {name: cells for name, *cells in rows[2:]}
    return found


def test_every_kind_of_run_is_resumed_by_every_kind_within_the_bounds():
    found = tables(PAGE.read_text(encoding="utf-8"))
    assert found.keys() == {"fp32", "bf16"}, "run make matrix"
    for precision, rows in found.items():
        assert list(rows) == KINDS
        for cell in (cell for cells in rows.values() for cell in cells):
            first, losses = map(float, cell.split(" / "))
            assert first <= TOLERANCES[precision].first_losses
            assert losses <= TOLERANCES[precision].losses


def test_the_same_run_goes_on_to_the_bit_and_nothing_that_was_loaded_has_changed():
    text = PAGE.read_text(encoding="utf-8")
    same = sum(pair.saved == pair.resumed for pair in PAIRS)
    assert f"{same} of {same} pairs have bit-equal losses" in re.sub(r"\s+", " ", text)
    assert f"{len(PAIRS)} of {len(PAIRS)} pairs have the same hash" in re.sub(r"\s+", " ", text)
    assert f" 0 of {len(PAIRS)} pairs are beyond them" in text


@pytest.fixture
def figures():
    """Of every pair, far apart and within its bound."""
    same = {pair: pair.saved == pair.resumed for pair in PAIRS}
    return {
        pair: Resumption(number * 1e-10, (number * 7 % 97 + 1) * 1e-8, same[pair], True)
        for number, pair in enumerate(PAIRS)
    }


def written(figures, monkeypatch, path):
    monkeypatch.setattr(resuming, "measure", lambda pairs: {pair: figures[pair] for pair in pairs})
    resuming.main([str(path)])


def test_the_page_is_made_of_the_figures(figures, monkeypatch, tmp_path):
    written(figures, monkeypatch, tmp_path / "page.md")
    found = tables((tmp_path / "page.md").read_text(encoding="utf-8"))
    saved, resumed = KINDS[1], KINDS[5]
    inside = [
        each.losses
        for pair, each in figures.items()
        if f"{pair.saved.backend} {pair.saved.strategy}" == saved
        and f"{pair.resumed.backend} {pair.resumed.strategy}" == resumed
        and pair.saved.precision == "bf16"
    ]
    assert len(inside) == 9
    assert found["bf16"][saved][5].endswith(f" / {max(inside):.0e}")


@pytest.mark.parametrize(
    "broken",
    [{"first_losses": 1e-3}, {"losses": 1.0}, {"losses": float("nan")}, {"same_bits": False}, {"same_state": False}],
    ids=lambda broken: "-".join(broken),
)
def test_a_pair_that_does_not_hold_is_shown_and_raised(broken, figures, monkeypatch, tmp_path):
    pair = PAIRS[0]
    figures[pair] = figures[pair]._replace(**broken)
    with pytest.raises(AssertionError, match=f"1 of {len(PAIRS)}:\n{pair}"):
        written(figures, monkeypatch, tmp_path / "page.md")
    assert f"| {pair} | " in (tmp_path / "page.md").read_text(encoding="utf-8")
