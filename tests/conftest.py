"""Marks what starts processes, so that `pytest -m "not ranks"` is quick."""

from __future__ import annotations

from pathlib import Path

import pytest

_RANKS = Path(__file__).parent / "ranks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _RANKS in item.path.parents:
            item.add_marker("ranks")
