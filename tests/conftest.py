"""Marks what starts ranks, so that `pytest -m "not ranks"` is quick, and `-n 2 --dist loadgroup` plays ranks in one worker alone.

Ranks of several tests at once would take each other's time, and some tests measure time or memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_RANKS = Path(__file__).parent / "ranks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _RANKS in item.path.parents:
            item.add_marker("ranks")
            item.add_marker(pytest.mark.xdist_group("ranks"))
