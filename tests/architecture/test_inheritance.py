"""A class of ours is abstract or final, and a method that it implements is not overridden around a call of `super()`:
who reads a class knows what it does, without those above it. What several share is an object that each of them has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from test_layers import FILES, ROOT

ADAPTERS = ("ShardedModel", "Updates")
LAYERED = ("unishard/formats", "unishard/integrations")
"""Where a dialect of a format, or a part of a framework's class, still builds on another."""


class Class(NamedTuple):
    """A class of ours."""

    place: str
    node: ast.ClassDef
    own_bases: list[str]
    """Those that it derives from and that are ours, not a library's."""

    def methods(self) -> Iterator[ast.FunctionDef]:
        return (each for each in self.node.body if isinstance(each, ast.FunctionDef))


def classes_in(text: str, place: str) -> list[Class]:
    nodes = [*ast.walk(ast.parse(text))]
    defined = [node for node in nodes if isinstance(node, ast.ClassDef)]
    ours = {node.name for node in defined}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unishard"):
            ours |= {each.asname or each.name for each in node.names}
    return [
        Class(place, node, [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in ours])
        for node in defined
    ]


@pytest.fixture(scope="module")
def classes() -> dict[str, Class]:
    """Those of the code, by name."""
    return {
        each.node.name: each
        for path in FILES
        for each in classes_in(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    }


def implemented_above(kind: Class, known: dict[str, Class]) -> set[str]:
    """The methods of the classes of ours that a class derives from."""
    above = [known[name] for name in kind.own_bases if name in known and known[name] is not kind]
    return {
        name for each in above for name in {method.name for method in each.methods()} | implemented_above(each, known)
    }


def around_super(kind: Class, known: dict[str, Class]) -> list[str]:
    """The methods besides `__init__` that override one of ours and call `super()`."""
    above = implemented_above(kind, known)
    return [
        f"{kind.place}: {kind.node.name}.{method.name}"
        for method in kind.methods()
        if method.name != "__init__" and method.name in above
        if any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(method))
    ]


def test_no_method_calls_the_one_that_it_overrides(classes: dict[str, Class]) -> None:
    looked_at = [kind for kind in classes.values() if not kind.place.startswith(LAYERED)]
    assert [call for kind in looked_at for call in around_super(kind, classes)] == []


def test_an_adapter_is_final_and_derives_from_the_contract_alone(classes: dict[str, Class]) -> None:
    adapters = [
        kind for kind in classes.values() if set(kind.own_bases) & {*ADAPTERS} and kind.node.name not in ADAPTERS
    ]
    assert {kind.node.name for kind in adapters} == {
        *("FSDPModel", "FSDPUpdates", "DDPModel", "DDPUpdates"),
        *("ZeroModel", "ZeroUpdates", "ReplicaAdapter"),
    }
    for kind in adapters:
        assert len(kind.node.bases) == 1, kind.node.name
        assert "final" in {each.id for each in kind.node.decorator_list if isinstance(each, ast.Name)}, kind.node.name
        supers = [
            method.name
            for method in kind.methods()
            for node in ast.walk(method)
            if isinstance(node, ast.Name) and node.id == "super"
        ]
        assert set(supers) <= {"__init__"}, f"{kind.node.name}: {supers}"


def test_the_check_finds_what_it_looks_for() -> None:
    text = (
        "class Base:\n    def step(self): pass\n    def close(self): pass\n"
        "class Middle(Base): pass\n"
        "class Bad(Middle):\n    def step(self):\n        super().step()\n    def close(self): pass\n"
        "class Foreign(torch.optim.Optimizer):\n    def step(self):\n        super().step()\n"
    )
    known = {each.node.name: each for each in classes_in(text, "bad.py")}
    assert [call for each in known.values() for call in around_super(each, known)] == ["bad.py: Bad.step"]
