"""Pages that show measurements say what is kept of the last ones."""

import argparse
from importlib import import_module

import pytest

from dev import measured
from dev.measured import ROOT, Measured

NAMES = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*/measured.json"))


@pytest.mark.parametrize("name", NAMES)
def test_pages_say_what_is_kept(name):
    found = import_module(f"{name.replace('/', '.')}.page").MEASURED
    assert found.file == f"{name}/measured.json"
    assert found.stale() == [], f"run `python -m {name.replace('/', '.')} --kept`"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program of its own checkout, given a command line: what its page says then."""
    monkeypatch.setattr(measured, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Above.\n<!-- cells: x -->\n<!-- end of cells -->\nBelow.\n")
    (tmp_path / "kept.json").write_text('{"cells": 1}')
    cells = Measured("cells", "kept.json", {"page.md": lambda results: f"{results['cells']} cells."})

    def run(*words, count=2):
        monkeypatch.setattr("sys.argv", ["cells", *words])
        written = cells.run(argparse.ArgumentParser(), lambda given: count and {"cells": count})
        assert cells.stale() == ([] if written else ["page.md"])
        return (tmp_path / "page.md").read_text().splitlines()[2]

    return run


def test_what_was_measured_is_written_where_that_is_asked_for(program):
    assert program() == "<!-- end of cells -->"
    assert program("--write", count=None) == "<!-- end of cells -->"
    assert program("--kept") == "1 cells."
    assert program("--write") == "2 cells."
    assert program("--kept") == "2 cells."
