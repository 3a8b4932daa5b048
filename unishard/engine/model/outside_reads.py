"""Find embeddings whose weight another module's forward reads, as in DeBERTa's `self.rel_embeddings.weight`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

_OF_SHARDS_TOO = ("dtype", "device")
"""Attributes of a weight that its shard has as well."""


def embeddings_read_outside(model: nn.Module) -> set[nn.Module]:
    """Embeddings whose weight a forward of a module around them reads: such a weight must be gathered outside the
    embedding too.

    Finds what the source of the forward, or of a method that it calls, says as `self.name.weight`. Another way to read
    it is an error of the engine in the first forward.
    """
    embeddings: set[nn.Module] = set()
    for module in model.modules():
        if any(isinstance(inner, nn.Embedding) for inner in module.modules() if inner is not module):
            kind: Any = type(module)  # which mypy takes for unhashable
            read = (_submodule(module, path) for path in _read_in_forward(kind))
            embeddings.update(inner for inner in read if isinstance(inner, nn.Embedding))
    return embeddings


def _submodule(module: nn.Module, path: tuple[str, ...]) -> Any:
    part: Any = module
    for name in path:
        part = getattr(part, name, None)
    return part


@cache
def _read_in_forward(kind: Any) -> frozenset[tuple[str, ...]]:
    """The names between `self` and `weight` in what the forward of a class reads."""
    reads: set[tuple[str, ...]] = set()
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        method = inspect.getattr_static(kind, name, None)
        if name in seen or not inspect.isfunction(method) or getattr(nn.Module, name, None) is method:
            continue
        seen.add(name)
        for path in _paths(method):
            if len(path) == 1:
                waiting.append(path[0])
            elif path[-1] == "weight":
                reads.add(path[:-1])
    return frozenset(reads)


def _paths(method: Any) -> Iterator[tuple[str, ...]]:
    """The names behind `self` in a method, such as `("embeddings", "word_embeddings", "weight")`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):  # no source, as of a method that was made at run time
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    harmless = {node.value for node in nodes if node.attr in _OF_SHARDS_TOO}
    for node in nodes:
        if node not in harmless:
            names, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                names.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name) and at.id == "self":
                yield tuple(reversed(names))
