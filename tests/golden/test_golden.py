"""Nothing of what unishard generates, or says about itself, changes unseen."""

from __future__ import annotations

from pathlib import Path

import bless
import pytest

FILES = dict(bless.expected())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_file(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path], "if this change is meant: python -m tests.golden.bless"


def test_no_file_is_left_over() -> None:
    assert {path for folder in bless.FOLDERS for path in bless.HERE.glob(f"{folder}/*")} == FILES.keys()
