"""Who may import whom. The contracts stand in pyproject.toml, under `tool.importlinter`."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    ROOT / name
    for name in (
        "unishard",
        "backends/unishard_fsdp",
        "backends/unishard_deepspeed",
        "backends/unishard_arguments",
        "dev",
    )
]
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
FORMATS = ROOT / "unishard" / "formats"
SHIPPED = [path for path in FILES if not path.is_relative_to(ROOT / "dev")]
CORE = [path for path in FILES if path.is_relative_to(ROOT / "unishard") and not path.is_relative_to(FORMATS)]
"""What must not know the engines by name. A format may: it describes a tool that drives one of them."""
NAMES = {"fsdp", "deepspeed"}
CLASS_CHECKS = ("isinstance", "issubclass")
ENGINES = {
    "DeepSpeedEngine",
    "FSDPModule",
    "DistributedDataParallel",
    "Engine",
    "ShardedModel",
    "Updates",
    "ReplicaAdapter",
}
LONG = {"unishard/engine/engine.py": 584}
"""One class, whose documented methods are the loop; two of three lines are documentation."""
FORBIDDEN_WORDS = ("Manager", "Handler", "Utils", "Wrapper", "Plugin")


def test_contracts() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_every_room_has_its_place_in_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    rooms = {path.stem for path in (ROOT / "unishard").glob("*.py")} | {
        path.parent.name for path in (ROOT / "unishard").glob("*/__init__.py")
    }
    assert rooms - {"__init__", "__main__"} == placed


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def engine_names(path: Path) -> list[str]:
    """Places that decide by the name or class of an engine."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        looked_at: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            looked_at = [node]
        elif isinstance(node, ast.match_case):
            looked_at = [node.pattern]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASS_CHECKS:
            classes = {getattr(leaf, "id", getattr(leaf, "attr", "")) for leaf in ast.walk(node.args[1])}
            found += [f"{_id(path)}:{node.lineno}: asks which engine it is"] * bool(classes & ENGINES)
        words = {leaf.value for each in looked_at for leaf in ast.walk(each) if isinstance(leaf, ast.Constant)}
        found += [f"{_id(path)}: compares with the name of a backend"] * bool(words & NAMES)
    return found


def test_the_core_decides_nothing_by_the_name_or_class_of_an_engine() -> None:
    assert [problem for path in CORE for problem in engine_names(path)] == []


def test_files_stay_small_and_plain() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        assert len(text.splitlines()) <= LONG.get(_id(path), 400), path
        headings = [line for line in text.splitlines() if line.startswith("# -- ")]
        assert headings == [], f"{path}: a part with a heading is a file of its own"
        assert ast.get_docstring(tree), f"{path}: says in a line or two what this room is for"
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                assert not node.name.endswith(FORBIDDEN_WORDS), f"{path}: {node.name}: name what it is"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: a bare except hides bugs"


def test_no_two_classes_of_what_is_shipped_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in SHIPPED:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(_id(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_check_of_engine_names_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_layers.ROOT", tmp_path)
    for text in (
        "if backend == 'fsdp': pass",
        "x = cfg.backend in ('deepspeed', 'y')",
        "isinstance(engine, ds.DeepSpeedEngine)",
        "isinstance(adapter, ShardedModel)",
        "match backend:\n    case 'fsdp': pass",
    ):
        path = tmp_path / "bad.py"
        path.write_text(text)
        assert len(engine_names(path)) == 1, text
