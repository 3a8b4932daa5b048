"""What to say where a command that takes unishard's own files is given one of another tool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unishard.errors import ConfigError, Problem

__all__ = ["own_file"]


@contextmanager
def own_file(path: Path) -> Iterator[None]:
    """Turn the many mistakes that another tool's config is full of into one that says what it is.

    Raises:
        ConfigError: As inside, or that the file is of another tool.
    """
    try:
        yield
    except ConfigError as error:
        tool = _tool_of(path)
        if tool is None:
            raise
        advice = f"translate it first: unishard translate {path} --to unishard -o cfg.yaml"
        raise ConfigError([Problem("", f"is a config of {tool}, and this command takes unishard's own; {advice}", str(path))]) from error


def _tool_of(path: Path) -> str | None:
    """The format of a file that is another tool's, half of whose keys or more our config does not have; None for all others."""
    from unishard.config import Config
    from unishard.formats import catalog
    from unishard.formats.source import open_source

    try:
        source = open_source(path)
        name = catalog.recognise(source).name
    except ConfigError:
        return None
    strange = [key for key in source.data if key not in Config.model_fields]
    return name if name != "unishard" and 2 * len(strange) >= len(source.data) else None
