"""`pytest -m gpu` runs every test that needs a CUDA device, and only those."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
_ON_A_DEVICE = re.compile(r".*\.cuda|torch\.cuda\.(synchronize|current_device|_sleep|Stream|Event)")
_MARK = "pytest.mark.gpu"


def functions() -> Iterator[tuple[str, bool, bool]]:
    """Each test, whether it calls what only a device answers and no stand-in of monkeypatch, and whether it is
    marked."""
    for path in sorted(
        set(TESTS.rglob("test_*.py")) - set(TESTS.rglob("test_on_device_*.py"))
    ):  # those have a simulated one
        tree = ast.parse(path.read_text(encoding="utf-8"))
        everywhere = any(
            isinstance(node, ast.Assign) and ast.unparse(node) == f"pytestmark = {_MARK}" for node in tree.body
        )
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                stands_in = any(argument.arg == "monkeypatch" for argument in node.args.args)
                calls = [ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
                marked = everywhere or _MARK in map(ast.unparse, node.decorator_list)
                yield f"{path.name}::{node.name}", not stands_in and any(map(_ON_A_DEVICE.fullmatch, calls)), marked


def test_what_needs_a_device_is_marked() -> None:
    found = list(functions())
    assert [name for name, needs, marked in found if needs and not marked] == []
    assert {name.partition("::")[0] for name, _, marked in found if marked} == {
        "test_cuda_devices.py",
        "test_device_wait.py",
        "test_host_read.py",
    }
