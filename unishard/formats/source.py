"""A config file of any tool, as plain data with the line of every key."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unishard.errors import ConfigError, Problem
from unishard.loading import Origins, Place
from unishard.loading.document import from_text, text_of

__all__ = ["Source", "open_source"]

_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|#[^\n]*|\t', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """What a file says, before anyone knows which tool's it is."""

    name: str
    """Of the file; empty for a mapping."""
    data: Mapping[str, Any]
    origins: Origins
    warnings: tuple[str, ...] = ()
    """What its own tool may not accept."""
    folder: Path | None = None
    """Where relative paths in it start; None for a mapping."""


def open_source(source: str | Path | Mapping[str, Any]) -> Source:
    """Open a YAML, JSON or TOML file, or take a mapping as what one would hold.

    JSON may have comments and trailing commas, and YAML may merge mappings.

    Raises:
        ConfigError: The file cannot be read, or is no mapping.
    """
    if isinstance(source, Mapping):
        return Source("", source, Origins(Place("")))
    path = Path(source)
    content = text_of(path)
    if path.suffix == ".toml":
        return Source(str(path), _toml(content, path), Origins(Place(str(path))), folder=path.parent)
    cleaned, warnings = _cleaned(content, path)
    document = from_text(cleaned, str(path), foreign=True)
    if document.findings:
        raise ConfigError([Problem(".".join(map(str, f.path)), f.what, str(f.place or path)) for f in document.findings])
    if not isinstance(document.data, dict):
        kind = "empty" if document.data is None else "a list" if isinstance(document.data, list) else "a single value"
        raise ConfigError([Problem("", f"is {kind}, and a config is a mapping of keys to values; name another file", str(path))])
    return Source(str(path), document.data, document.origins, tuple(warnings), path.parent)


def _toml(content: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([Problem("", f"is not TOML: {error}; mend the file", str(path))]) from None


def _cleaned(content: str, path: Path) -> tuple[str, list[str]]:
    """JSON without what only lenient readers take, in the same lines; YAML as it is."""
    if not re.match(r"\s*(//|/\*|\{(?![{%]))", content):
        return content, []
    warnings = []
    try:
        json.loads(content)
    except ValueError as error:
        warnings.append(f"{path}: is not strict JSON ({error}); read as what it must mean, but tools that read strict JSON refuse it")
    except RecursionError:
        pass  # the YAML reader says so
    return _TOKEN.sub(_blank, content), warnings


def _blank(token: re.Match[str]) -> str:
    text = token.group()
    if text.startswith('"'):
        return text.replace(r"\/", "/")
    return re.sub(r"[^\n]", " ", text)
