from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from unishard import BackendError
from unishard.contract import registry
from unishard.contract.backend import Backend

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


@pytest.mark.parametrize("group", [registry.GROUP, registry.FORMATS])
def test_a_bare_checkout_offers_what_is_installed(group: str) -> None:
    assert {entry.name: entry.value for entry in registry._checkout(group)} == {
        name: entry.value for name, entry in registry.available(group).items()
    }


def test_the_same_entry_point_seen_twice_is_one() -> None:
    twice = [point("fsdp", "unishard_fsdp:backend", "unishard") for _ in range(2)]
    assert list(registry.select(twice)) == ["fsdp"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts distributions on the path, as pip does; a later one comes before an earlier one."""

    def put(name: str, version: str, *points: str, group: str = registry.GROUP) -> None:
        folder = tmp_path / f"{name}-{version}"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if points:
            (info / "entry_points.txt").write_text("\n".join((f"[{group}]", *points)) + "\n")
        monkeypatch.syspath_prepend(str(folder))

    def forget() -> None:
        registry.available.cache_clear()
        registry._installed.cache_clear()

    forget()
    yield put
    forget()


def test_what_another_distribution_offers_is_found(install: Callable[..., None]) -> None:
    install("Other_Engine", "1.0", "other = other_engine:backend")
    install("other_format", "1.0", "other = other_format:FORMAT", group=registry.FORMATS)
    install("unrelated", "1.0", "other = unrelated:main", group="console_scripts")
    install("nothing", "1.0")
    assert list(registry.available()) == ["deepspeed", "fsdp", "other"]
    assert registry.available()["other"].value == "other_engine:backend"
    formats = registry.available(registry.FORMATS)
    assert formats["other"].value == "other_format:FORMAT"
    assert formats.keys() > {"unishard", "deepspeed", "accelerate", "hf"}


@pytest.mark.parametrize(("group", "kind"), [(registry.GROUP, "backend"), (registry.FORMATS, "format")])
def test_two_distributions_that_offer_one_name_are_refused(install: Callable[..., None], group: str, kind: str) -> None:
    install("one", "1.0", "third = one:it", group=group)
    install("two", "1.0", "third = two:it", group=group)
    with pytest.raises(
        BackendError,
        match=f"{kind} 'third' is offered twice: two:it by two and one:it by one; uninstall one of the two",
    ):
        registry.available(group)


def test_of_a_distribution_that_is_on_the_path_twice_the_first_counts(install: Callable[..., None]) -> None:
    install("Other_Engine", "1.0", "other = other_engine.old:backend", "older = other_engine.old:older")
    install("other_engine", "2.0", "other = other_engine:backend")
    assert registry.available()["other"].value == "other_engine:backend"
    assert "older" not in registry.available()


def test_bare_checkout(tmp_path: Path) -> None:
    """Nothing of ours installed: every package of this environment but unishard, and the checkout on the path."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "unishard" not in entry.name and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    code = "from unishard.contract import registry; print({n: registry.source_of(n) for n in registry.available()})"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "{'deepspeed': 'this checkout', 'fsdp': 'this checkout'}\n"
