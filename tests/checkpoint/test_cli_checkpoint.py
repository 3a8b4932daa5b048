"""What a person sees of checkpoints on a terminal; the rest is in tests/console/checkpoint.md."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from stored import store

from unishard.cli import checkpoint as commands
from unishard.cli.bar import bar
from unishard.cli.checkpoint_facts import size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "drawn"), [(40, False), (200, True)])
def test_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, drawn: bool) -> None:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", screen)
    store(tmp_path / "step-00000030")
    commands.list_(tmp_path)
    assert ("│" in screen.getvalue()) is drawn
    commands.inspect(tmp_path, tensors=True)
    assert "model.a.weight" in screen.getvalue().replace("\n", "")


def test_the_bar_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", screen)
        with bar("files", 100) as advance:
            advance(100)
        assert ("files" in screen.getvalue()) is screen.isatty()


def test_sizes() -> None:
    assert [size(count) for count in (0, 999, 1000, 1_273_000_000, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.27 GB",
        "5 TB",
    ]
