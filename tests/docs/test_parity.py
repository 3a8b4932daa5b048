"""docs/parity.csv has every cell that the conformance suite has now and no figure beyond its bound, and docs/parity.md
and README say what it has."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from test_conformance import ELSEWHERE

from dev.parity import __main__ as command
from dev.parity.page import largest, page
from dev.parity.rows import FAILED, REFUSED, ParityRow, read
from unishard.contract.tolerances import Tolerance
from unishard.testing import conformance
from unishard.testing.cells import BACKENDS
from unishard.testing.features import FEATURES

ROOT = Path(__file__).parents[2]
ROWS = read(ROOT / "docs/parity.csv")
CELLS = {str(cell): cell for cell in conformance.cells()}


def test_every_cell_of_the_suite_has_a_row_for_each_engine_and_no_other():
    assert [(row.engine, row.cell) for row in ROWS] == [(engine, cell) for engine in BACKENDS for cell in CELLS], (
        "run make parity"
    )


def test_every_figure_is_within_its_bound_and_every_refusal_declared():
    for row in ROWS:
        cell = CELLS[row.cell]
        if FEATURES[cell.feature].refuses(row.engine, cell):
            assert row.error.startswith(REFUSED), f"{row.engine} {row.cell}: run make parity"
        else:
            bound = conformance.tolerance(row.engine, cell)
            bounds = (bound.first_losses, bound.losses, bound.first_norm, bound.norms)
            assert not row.error
            assert all(figure <= most for figure, most in zip(row.figures, bounds, strict=True)), row


def test_the_page_says_what_the_data_says():
    text = (ROOT / "docs/parity.md").read_text(encoding="utf-8")
    (environment,) = re.findall(r"^`make parity`: (.*)\.$", text, re.MULTILINE)
    assert text == page(ROWS, environment), "run make parity"


def test_readme_has_the_largest_deviations():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = {
        (engine, precision): [float(figure) for figure in figures.split("|")]
        for engine, precision, figures in re.findall(
            r"^\| (\w+), (\w+\d) \|([^|]+(?:\|[^|]+){3})\|$", readme, re.MULTILINE
        )
    }
    assert table == {(engine, precision): [*map(float, figures)] for engine, precision, *figures in largest(ROWS)}


def test_readme_and_contributing_say_how_many_cells_there_are():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    readme, contributing = (" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    suite = [cell for cell in conformance.suite() if cell.feature not in ELSEWHERE]
    plain = FEATURES.keys() & {"plain"}
    assert f"with each of {len(FEATURES.keys() - plain)} features" in readme
    assert f"of all {len(CELLS)} cells on each engine" in readme
    assert f"`make test` runs {len(suite)} of them" in readme
    assert f"measures {len(suite)} of {len(CELLS)} cells, each on one engine or both" in contributing


@pytest.fixture
def rows():
    """A row for every cell, each with larger figures than the last."""
    names = [(engine, name) for engine in BACKENDS for name in CELLS]
    return [ParityRow(*name, (number * 1e-9,) * 4) for number, name in enumerate(names)]


def test_a_cell_that_fails_is_written_and_named_and_the_others_are_kept(rows, monkeypatch, tmp_path, capsys):
    broken = rows[0]._replace(figures=(), error=f"{FAILED}rank 1 failed, with | and\n, in it")
    refused = rows[1]._replace(figures=(), error=f"{REFUSED}no such strategy")
    monkeypatch.setattr(command, "measured", lambda: iter([broken, refused, *rows[2:]]))
    assert command.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{broken.engine}, {broken.cell}: {broken.error}\n"
    written = read(tmp_path / "parity.csv")
    assert written[:2] == [broken, refused]
    assert len(written) == len(rows)
    assert "1 are refused, and 1 failed" in (tmp_path / "parity.md").read_text(encoding="utf-8")


def test_the_page_is_made_of_the_rows(rows, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "measured", lambda: iter(rows))
    assert command.main([str(tmp_path)]) == 0
    text = (tmp_path / "parity.md").read_text(encoding="utf-8")
    near = [row for row in rows if CELLS[row.cell].precision != "fp16"][-10:]
    shown = re.findall(rf"^\| (?:{'|'.join(BACKENDS)}) \| (\S+ranks) \| ", text, re.MULTILINE)
    assert shown == [row.cell for row in reversed(near)], "the bounds of fp16 are wider"
    last = rows[-1]
    assert f"| {last.engine} | {CELLS[last.cell].precision} | {' | '.join([f'{last.figures[0]:.1e}'] * 4)} |" in text
    assert "their own bounds.\n\nNone.\n" in text


def test_a_declared_gap_has_a_row_with_its_bounds_and_what_was_measured(rows, monkeypatch):
    wide = Tolerance(1e-3, 2e-3, 3e-3, 4e-3, "upstream rounds twice")
    gap = conformance.KnownGap("deepspeed", "mlp", "no_shard", "bf16", wide, "https://example.org/issue")
    monkeypatch.setattr(conformance, "GAPS", (gap,))
    inside = [row for row in rows if conformance.tolerance(row.engine, CELLS[row.cell]) is wide]
    (line,) = [line for line in page(rows, "").splitlines() if line.startswith("| deepspeed | mlp, no_shard, bf16 |")]
    assert "| 1e-03 / 2e-03 / 3e-03 / 4e-03 |" in line
    assert f"{inside[-1].figures[0]:.1e}" in line
    assert "upstream rounds twice ([source](https://example.org/issue))" in line
