"""The error when a command for unishard files gets another tool's config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unishard.errors import ConfigError, Problem


@contextmanager
def own_file(path: Path) -> Iterator[None]:
    """Replace the errors of another tool's config by one that names the tool.

    Raises:
        ConfigError: As inside, or because the file is another tool's.
    """
    try:
        yield
    except ConfigError as error:
        tool = _tool_of(path)
        if tool is None:
            raise
        advice = f"translate it first: unishard translate {path} --to unishard -o cfg.yaml"
        raise ConfigError(
            [Problem("", f"is a config of {tool}, but this command needs a unishard config; {advice}", str(path))]
        ) from error


def _tool_of(path: Path) -> str | None:
    """The format of another tool's file, if our schema lacks at least half of its keys; None otherwise."""
    from unishard.config import Config
    from unishard.formats import catalog
    from unishard.formats.files.source import open_source

    try:
        source = open_source(path)
        name = catalog.recognise(source).name
    except ConfigError:
        return None
    strange = [key for key in source.data if key not in Config.model_fields]
    return name if name != "unishard" and 2 * len(strange) >= len(source.data) else None
