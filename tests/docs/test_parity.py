"""docs/parity.md lists every cell that the conformance suite has now, and no figure beyond its bound."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev import parity
from unishard.contract.tolerances import TOLERANCES, Tolerance
from unishard.testing import conformance
from unishard.testing.conformance import Deviation, Refusal
from unishard.testing.features import FEATURES

PAGE = Path(__file__).parents[2] / "docs/parity.md"
CELLS = {str(cell): cell for cell in conformance.cells()}


def rows() -> dict[str, list[str]]:
    """What the page says of each cell, by backend."""
    table = PAGE.read_text(encoding="utf-8").partition("## Every cell")[2]
    found = {}
    for line in table.splitlines():
        if line.startswith("| ") and "ranks |" in line:
            name, *answers = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
            assert name not in found
            found[name] = answers
    return found


def test_every_cell_of_the_suite_has_a_row_and_no_other():
    assert rows().keys() == CELLS.keys(), "run make parity"


def test_every_figure_is_within_its_bound_and_every_refusal_declared():
    for name, answers in rows().items():
        for backend, answer in zip(parity.BACKENDS, answers, strict=True):
            cell = CELLS[name]
            assert answer != "FAILED"
            assert answer.startswith("refused: ") is FEATURES[cell.feature].refuses(backend, cell), (
                f"{backend} {name}: run make parity"
            )
            if not answer.startswith("refused: "):
                bound = conformance.tolerance(backend, cell)
                bounds = (bound.first_losses, bound.losses, bound.first_norm, bound.norms)
                assert all(float(figure) <= most for figure, most in zip(answer.split(" / "), bounds, strict=True)), (
                    f"{backend} {name}"
                )


def test_readme_and_contributing_say_how_many_cells_there_are():
    pages = [PAGE.parents[1] / name for name in ("README.md", "CONTRIBUTING.md")]
    readme, contributing = (" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    suite, plain = conformance.suite(), FEATURES.keys() & {"plain"}
    assert f"with each of {len(FEATURES.keys() - plain)} features" in readme
    assert f"of all {len(CELLS)} cells on each engine" in readme
    assert f"`make test` runs {len(suite)} of them" in readme
    assert f"measures {len(suite)} of {len(CELLS)} cells, most of them on each engine" in contributing


@pytest.fixture
def figures():
    """Of every cell, each larger than the last."""
    given = {}
    for number, (backend, cell) in enumerate((backend, cell) for backend in parity.BACKENDS for cell in CELLS.values()):
        refused = FEATURES[cell.feature].refuses(backend, cell)
        given[backend, cell] = (
            Refusal("ConfigError: a | b: c") if refused else Deviation(*(number * 1e-9 for _ in range(4)), 0.0)
        )
    return given


def test_a_cell_that_breaks_is_shown_and_raised_and_the_others_are_kept(figures, monkeypatch, tmp_path):
    broken, *_ = figures
    monkeypatch.setattr(
        parity, "_measured", lambda: iter((figures | {broken: parity.Failure("rank 1 failed")}).items())
    )
    with pytest.raises(AssertionError, match="rank 1 failed"):
        parity.main([str(tmp_path / "parity.md")])
    text = (tmp_path / "parity.md").read_text(encoding="utf-8")
    assert text.count("FAILED") == 1
    assert text.count("ranks |") > len(CELLS)


def test_the_page_is_made_of_the_figures(figures, monkeypatch, tmp_path):
    monkeypatch.setattr(parity, "_measured", lambda: iter(figures.items()))
    parity.main([str(tmp_path / "parity.md")])
    text = (tmp_path / "parity.md").read_text(encoding="utf-8")
    last = list(CELLS.values())[-1]
    within = [
        cell
        for cell in CELLS.values()
        if cell.precision == "fp32" and conformance.tolerance("fsdp", cell) is TOLERANCES["fp32"]
    ]
    worst = max(within, key=lambda cell: getattr(figures["fsdp", cell], "losses", -1.0))
    assert f"| fsdp | fp32 | losses | {figures['fsdp', worst].losses:.1e} | {worst} |" in text
    assert f"| {last} | " in text
    assert "their own bounds.\n\nNone.\n" in text


def test_a_declared_gap_has_a_row_with_its_bounds_and_what_was_measured(figures, monkeypatch):
    wide = Tolerance(1e-3, 2e-3, 3e-3, 4e-3, "upstream rounds twice")
    gap = conformance.KnownGap("deepspeed", "mlp", "no_shard", "bf16", wide, "https://example.org/issue")
    monkeypatch.setattr(conformance, "GAPS", (gap,))
    inside = [
        cell for backend, cell in figures if backend == "deepspeed" and conformance.tolerance(backend, cell) is wide
    ]
    worst = max(figures["deepspeed", cell].losses for cell in inside)
    row = next(
        line for line in parity.page(figures).splitlines() if line.startswith("| deepspeed | mlp, no_shard, bf16 |")
    )
    assert "| 1e-03 / 2e-03 / 3e-03 / 4e-03 |" in row
    assert f"{worst:.1e}" in row
    assert "upstream rounds twice ([source](https://example.org/issue))" in row
