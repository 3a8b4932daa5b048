"""What several tests of single rooms need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path `c.yaml` in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "c.yaml"
