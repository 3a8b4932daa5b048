"""Lets the sweep lay out files as the tests of formats and checkpoints do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unishard.failures import lifetime

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("formats", "checkpoint", "checkpoint/formats")]


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """Loading weights starts one, which the tests of other files do not expect."""
    yield
    lifetime.shutdown()
