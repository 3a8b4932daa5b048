from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from unishard import BackendError
from unishard.plugins import registry
from unishard.plugins.backend import Backend

ROOT = Path(__file__).resolve().parents[2]


class Distribution:
    def __init__(self, name: str) -> None:
        self.name = name


def point(name: str, value: str, distribution: str, group: str = registry.GROUP) -> EntryPoint:
    entry = EntryPoint(name, value, group)
    vars(entry)["dist"] = Distribution(distribution)
    return entry


def test_ours_are_found() -> None:
    assert list(registry.available()) == ["deepspeed", "fsdp"]
    for name in registry.available():
        backend = registry.get(name)
        assert isinstance(backend, Backend)
        assert backend.name == name


def test_a_name_offered_twice_is_refused_with_both_distributions() -> None:
    with pytest.raises(BackendError) as caught:
        registry.select([point("fsdp", "unishard_fsdp:backend", "unishard"), point("fsdp", "other:backend", "unishard-other")])
    assert str(caught.value) == (
        "backend 'fsdp' is offered twice: unishard_fsdp:backend by unishard and other:backend by unishard-other; uninstall one of the two"
    )


def test_a_format_offered_twice_is_refused_with_both_distributions() -> None:
    ours = point("hf", "unishard.formats.hf:FORMAT", "unishard", registry.FORMATS)
    with pytest.raises(BackendError, match=r"format 'hf' is offered twice: \S+ by unishard and other:FORMAT by unishard-other; uninstall"):
        registry.select([ours, point("hf", "other:FORMAT", "unishard-other", registry.FORMATS)])


@pytest.mark.parametrize("group", [registry.GROUP, registry.FORMATS])
def test_a_bare_checkout_offers_what_is_installed(group: str) -> None:
    assert {entry.name: entry.value for entry in registry._checkout(group)} == {
        name: entry.value for name, entry in registry.available(group).items()
    }


def test_the_same_entry_point_seen_twice_is_one() -> None:
    twice = [point("fsdp", "unishard_fsdp:backend", "unishard") for _ in range(2)]
    assert list(registry.select(twice)) == ["fsdp"]


def test_unknown_name() -> None:
    with pytest.raises(BackendError, match="no backend named 'deepsped'; did you mean 'deepspeed'"):
        registry.get("deepsped")
    with pytest.raises(BackendError, match="no backend named 'horovod'; installed: deepspeed, fsdp"):
        registry.get("horovod")


def test_how_to_install_what_is_missing() -> None:
    needy = SimpleNamespace(requires={"json": "torch", "no_such_package": "deepspeed", "nor_this": "deepspeed"})
    assert registry.missing(cast(Backend, needy)) == "pip install 'unishard[deepspeed]'"
    content = SimpleNamespace(requires={"json": "torch"})
    assert registry.missing(cast(Backend, content)) is None


def test_bare_checkout(tmp_path: Path) -> None:
    """Nothing of ours installed: every package of this environment but unishard, and the checkout on the path."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "unishard" not in entry.name and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    result = subprocess.run(
        [sys.executable, "-S", "-m", "unishard", "backends"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split("  ") for line in result.stdout.splitlines()]
    assert [line[0].strip() for line in lines] == ["backend", "deepspeed", "fsdp"]
    assert all("this checkout" in cells for cells in (list(map(str.strip, line)) for line in lines[1:]))
