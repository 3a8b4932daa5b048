"""Hypothesis without a clock and without chance: the same examples everywhere, on a busy machine too."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unishard", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unishard")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path `c.yaml` in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "c.yaml"
