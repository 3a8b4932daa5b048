"""A DeepSpeed that is too old is refused before anything is changed, with what to install."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import unishard
from unishard_deepspeed import backend, oldest, start

OLDEST = ".".join(map(str, oldest.OLDEST))


@pytest.mark.parametrize("version", ["0.19.7", "0.18.9", "0.9.10", "0.19.7+cu128"])
def test_an_older_version_is_one_error(monkeypatch, version):
    monkeypatch.setattr(oldest, "version_of", lambda package: version)
    with pytest.raises(
        unishard.BackendError, match=f"needs deepspeed>={OLDEST}; {version.replace('+', '.')} is installed"
    ) as raised:
        start.load(unishard.Topology(rank=0, world_size=1))
    assert str(raised.value).endswith(f"pip install -U 'deepspeed>={OLDEST}'")


def test_the_extra_asks_for_the_oldest_version_and_the_backend_was_tested_on_it():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"deepspeed>={OLDEST}" in extras["deepspeed"]
    assert backend.tested["deepspeed"][0] == OLDEST
