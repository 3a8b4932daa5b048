"""Shapes and activations of models that were planned before, as JSON files in the user's cache directory. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from unishard.plan.activations import Activations
from unishard.plugins.footprint import ModelShape, ParameterShape, TensorShape

__all__ = ["activations", "folder", "shape"]

_VERSION = 2
"""Raised when what is computed changes."""


def folder() -> Path:
    """`unishard/plan` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unishard" / "plan"


def shape(key: Sequence[Any], make: Callable[[], ModelShape]) -> ModelShape:
    """The cached shape of a key, made if it is missing."""
    found = _load(key)
    if found is None:
        made = make()
        _store(
            key,
            {
                "parameters": [astuple(each) for each in made.parameters],
                "buffers": [astuple(each) for each in made.buffers],
                "units": made.units,
            },
        )
        return made
    return ModelShape(
        tuple(ParameterShape(name, tuple(size), *rest) for name, size, *rest in found["parameters"]),
        tuple(TensorShape(name, tuple(size), dtype) for name, size, dtype in found["buffers"]),
        tuple(found["units"]),
    )


def activations(key: Sequence[Any], make: Callable[[], Activations]) -> Activations:
    """The cached activations of a key, made if they are missing."""
    found = _load(key)
    if found is None:
        made = make()
        _store(key, made.as_json())
        return made
    return Activations.from_json(found)


def _path(key: Sequence[Any]) -> Path:
    digest = hashlib.sha256(json.dumps([_VERSION, *key], default=str).encode()).hexdigest()
    return folder() / f"{digest[:32]}.json"


def _load(key: Sequence[Any]) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_path(key).read_text())
    return None


def _store(key: Sequence[Any], value: Any) -> None:
    """Write a file, completely or not at all; a cache that cannot be written is no error."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(value))
        part.replace(path)
