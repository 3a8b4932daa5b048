"""Nothing of what unishard generates, or says about itself, changes unseen."""

from __future__ import annotations

from pathlib import Path

import kept
import pytest

FILES = dict(kept.expected())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_file(path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--bless"):
        path.write_text(FILES[path], encoding="utf-8")
    assert path.exists(), "if it is meant: pytest tests/golden --bless"
    assert path.read_text(encoding="utf-8") == FILES[path], "if this change is meant: pytest tests/golden --bless"


def test_no_file_is_left_over() -> None:
    assert {path for folder in kept.FOLDERS for path in kept.HERE.glob(f"{folder}/*")} == FILES.keys()
