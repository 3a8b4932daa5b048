"""The table of how far every cell is from plain torch is made of the figures that were measured."""

from __future__ import annotations

import pytest

from unishard.testing import conformance, parity
from unishard.testing.conformance import Deviation, Refusal
from unishard.testing.features import FEATURES
from unishard.testing.tolerances import TOLERANCES

CELLS = conformance.cells()


@pytest.fixture
def figures():
    """Of every cell, each larger than the last."""
    given = {}
    for number, (backend, cell) in enumerate((backend, cell) for backend in parity.BACKENDS for cell in CELLS):
        refused = FEATURES[cell.feature].refuses(backend, cell)
        given[backend, cell] = Refusal("ConfigError: a | b: c") if refused else Deviation(*(number * 1e-9 for _ in range(4)), 0.0)
    return given


@pytest.fixture
def text(figures, monkeypatch, tmp_path):
    monkeypatch.setattr(parity, "_measured", lambda: iter(figures.items()))
    parity.main([str(tmp_path / "parity.md")])
    return (tmp_path / "parity.md").read_text(encoding="utf-8")


def test_every_cell_has_one_row(text):
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.partition("## Every cell")[2].splitlines() if "ranks | " in line]
    assert sorted(rows) == sorted(map(str, CELLS))


def test_the_worst_cells_are_named(text, figures):
    for backend in parity.BACKENDS:
        within = [cell for cell in CELLS if cell.precision == "fp32" and conformance.tolerance(backend, cell) is TOLERANCES["fp32"]]
        worst = max(within, key=lambda cell: getattr(figures[backend, cell], "losses", -1.0))
        assert f"| {backend} | fp32 | losses | {figures[backend, worst].losses:.1e} | {worst} |" in text
