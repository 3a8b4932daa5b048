"""Shapes and activations of models that were planned before, in files of the user's cache directory. Imports no torch.

A file has two lines: the SHA-256 of the second, and JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from unishard.config.loading.document import text_of
from unishard.contract.footprint import ModelShape
from unishard.tools.plan.activations import Activations

_VERSION = 5
"""Raised when what is computed, or its file, changes."""
_LARGEST = 2**28
"""Bytes of a file; the shape of a model of 100,000 parameters has 10 MB."""
Planned = TypeVar("Planned", ModelShape, Activations)


def folder() -> Path:
    """`unishard/tools/plan` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unishard" / "plan"


def shape(key: Sequence[Any], make: Callable[[], ModelShape]) -> ModelShape:
    """The cached shape of a key, made if it is missing."""
    return _cached(key, TypeAdapter(ModelShape), make)


def activations(key: Sequence[Any], make: Callable[[], Activations]) -> Activations:
    """The cached activations of a key, made if they are missing."""
    return _cached(key, TypeAdapter(Activations), make)


def _cached(key: Sequence[Any], kind: TypeAdapter[Planned], make: Callable[[], Planned]) -> Planned:
    """What the file of a key holds; made and stored where there is none, or its content is not what was stored."""
    path = folder() / f"{_digest(json.dumps([_VERSION, *key], default=str))[:32]}.json"
    with contextlib.suppress(ValueError):  # also a ConfigError and a ValidationError
        digest, _, content = text_of(path, _LARGEST).partition("\n")
        if digest == _digest(content):
            return kind.validate_json(content)
    made = make()
    content = kind.dump_json(made).decode()
    _store(path, f"{_digest(content)}\n{content}".encode())
    return made


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _store(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
