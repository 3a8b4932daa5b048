"""What lies in the wheel and the sdist."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "unishard": ROOT / "unishard",
    "unishard_fsdp": ROOT / "backends/unishard_fsdp",
    "unishard_deepspeed": ROOT / "backends/unishard_deepspeed",
    "unishard_arguments": ROOT / "backends/unishard_arguments",
}


def names(artefact: Path) -> set[str]:
    if artefact.suffix == ".whl":
        with zipfile.ZipFile(artefact) as archive:
            return set(archive.namelist())
    with tarfile.open(artefact) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of each file."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_the_wheel_installs_these_packages_and_nothing_else(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in names(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_module_table_and_the_typing_marker(wheel: Path, package: str) -> None:
    source = PACKAGES[package]
    paths = [path for kind in ("*.py", "*.txt", "*.json") for path in source.rglob(kind)]
    expected = {f"{package}/{path.relative_to(source)}" for path in [*paths, source / "py.typed"]}
    found = {name for name in names(wheel) if name.startswith(f"{package}/")}
    assert found == expected


def test_the_wheel_brings_the_licence(wheel: Path) -> None:
    assert "licenses/LICENSE" in {name.partition("/")[2] for name in names(wheel)}


def test_the_sdist_holds_what_it_takes_to_build_and_test(sdist: Path) -> None:
    found = names(sdist)
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "constraints.txt",
        "configs/llama_tiny.yaml",
    } <= found
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")} <= found
    assert not {name for name in found if name.startswith((".venv/", "dist/", "demo-out/")) or "__pycache__" in name}


def test_the_sdist_builds_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path, build_from: Callable[[str, Path, Path], Path]
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(
            tmp_path / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # Python 3.11.4
    (source,) = (tmp_path / "source").iterdir()
    assert contents(build_from("wheel", source, tmp_path / "out")) == contents(wheel)
