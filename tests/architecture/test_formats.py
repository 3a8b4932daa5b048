"""Every format is a folder of the same shape, and no format knows another."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from unishard.config import Config, leaves
from unishard.contract.entries import Key
from unishard.contract.rules import Fit, Rule
from unishard.formats import NAMES, catalog
from unishard.formats.format import Format

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "unishard" / "formats"
FORMATS = [name for name in NAMES if find_spec(f"unishard.formats.{name}")]
FIELDS = [path for path, _ in leaves(Config)]
SAID_OTHERWISE = (Fit.APPROXIMATE, Fit.IGNORED, Fit.NEEDS_INPUT, Fit.UNSUPPORTED)
BUILDS_ON = dict.fromkeys(("llamafactory", "trl"), "hf")
"""They hand their file to TrainingArguments, whose keys and words they have beside their own; no other format may build
on another."""

ROOMS = ("advice", "beside", "engines", "files", "launch", "reading", "report", "writing")
"""What the formats share, by job."""
SHARED = sorted([*FOLDER.glob("*.py"), *(path for room in ROOMS for path in (FOLDER / room).glob("*.py"))])


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_every_folder_is_a_room_or_a_format_that_the_catalog_knows() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/__init__.py")} - {"verify", *ROOMS} == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_imports_no_other_format(name: str) -> None:
    others = {f"unishard.formats.{other}" for other in NAMES if other not in (name, BUILDS_ON.get(name))}
    for path in (FOLDER / name).rglob("*.py"):
        found = {module for module in imported(path) if ".".join(module.split(".")[:3]) in others}
        assert not found, (
            f"{path.name} imports {found}; documents wrap engines through unishard.contract.registry, and nothing else"
        )


@pytest.mark.parametrize("path", SHARED, ids=lambda path: path.stem)
def test_what_formats_share_imports_none_of_them(path: Path) -> None:
    modules = {f"unishard.formats.{name}" for name in FORMATS}
    assert not {
        module
        for module in imported(path)
        if ".".join(module.split(".")[:3]) in modules - {"unishard.formats.unishard"}
    }


def test_to_recognize_a_document_no_tables_are_imported() -> None:
    code = (
        "import sys; from unishard.formats import catalog; from unishard.formats.files.source import "
        "open_source;print(catalog.recognise(open_source({'zero_optimization': {'stage': 2}})).name,[name for name in "
        "sys.modules if name.startswith('unishard.formats.') and name.endswith(('.format', '.keys', '.rules'))])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "deepspeed ['unishard.formats.format']\n"


def test_the_check_of_imports_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("from unishard.formats.hf.keys import KEYS\nimport unishard.formats.accelerate\n")
    assert {"unishard.formats.hf.keys", "unishard.formats.accelerate"} <= set(imported(path))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_shape(name: str) -> None:
    files = {path.name for path in (FOLDER / name).glob("*.py")}
    one: Format = catalog.get(name)
    assert one.name == name
    assert one.tool
    assert one.suffix.startswith(".")
    assert one.markers.keys
    assert {"__init__.py", "format.py"} <= files
    assert "keys.py" in files or not one.keys
    assert "rules.py" in files or not one.rules
    assert list((FOLDER / name).glob("**/*.py")) == list((FOLDER / name).glob("*.py"))


@pytest.mark.parametrize("name", FORMATS)
def test_tables_are_whole(name: str) -> None:
    one = catalog.get(name)
    for key, row in one.keys.items():
        assert isinstance(row, Key)
        assert "" not in key.split("."), key
        assert row.note or row.fit in (Fit.EXACT, Fit.EQUIVALENT), f"{key} says no reason"
    said = list(one.rules)
    assert said == [path for path in FIELDS if path in one.rules], "rows stand in the order of the schema"
    for path, rule in one.rules.items():
        assert isinstance(rule, Rule)
        assert rule.key, path
        assert rule.note or rule.fit not in SAID_OTHERWISE, f"{path} says no reason"
        assert ";" in rule.note or rule.fit is not Fit.UNSUPPORTED, f"{path} says no way out"
        for case in rule.when:
            assert case.case, path
            assert case.note or case.fit not in SAID_OTHERWISE, f"{path} if {case.case} says no reason"
            assert ";" in case.note or case.fit is not Fit.UNSUPPORTED, f"{path} if {case.case} says no way out"
