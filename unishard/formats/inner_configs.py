"""Finds DeepSpeed's own config in the file of a tool that only hands it on, whose other keys unishard does not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Path
from unishard.errors import ConfigError
from unishard.formats.signs import Signs
from unishard.formats.source import Source, open_named

_NAMES = ("deepspeed", "deepspeed_config", "ds_config")
_DEEPEST = 6
_ENOUGH = 3
"""Weight of the keys from which on a mapping is a config of DeepSpeed, and not that of another tool around it."""


class InnerConfig(NamedTuple):
    """A config of an engine inside a file."""

    key: str
    """Dotted; with the name of the file that stands there, if one does, as in `trainer.deepspeed: ds.json`."""
    source: Source
    """The config, with a warning that says what is not read."""


def block_in(source: Source, signs: Signs) -> InnerConfig | None:
    """The engine's config in a file, or in the file that it names; None where there is none, or the document is one
    itself.

    Args:
        source: The document.
        signs: By which the engine's config is known.
    """
    if signs.weight(source.data):
        return None
    found = [InnerConfig(*one) for one in _blocks(source, (), source.data) if signs.weight(one[1].data) >= _ENOUGH]
    if not found:
        return None
    first, *others = found
    differ = [one.key for one in others if one.source.data != first.source.data]
    only = f"only {first.key} is read; what the other keys say is not translated"
    also = [
        f"has other configs of this engine too ({', '.join(differ)}); put them into files of their own to translate "
        "them"
    ]
    return InnerConfig(
        first.key, first.source._replace(warnings=(*first.source.warnings, only, *(also if differ else [])))
    )


def _blocks(source: Source, path: Path, data: Mapping[str, Any]) -> Iterator[tuple[str, Source]]:
    for key, value in data.items():
        here = (*path, key)
        if key in _NAMES and isinstance(value, str):
            if named := _named(source, value):
                yield f"{'.'.join(here)}: {value}", named
        elif isinstance(value, Mapping) and len(here) < _DEEPEST:
            if key in _NAMES:
                yield ".".join(here), source._replace(data=value, origins=source.origins.below(here), repeats=())
            yield from _blocks(source, here, value)


def _named(source: Source, name: str) -> Source | None:
    try:
        return open_named(name, source.folder)
    except ConfigError:  # its own line of `unishard migrate` says why
        return None
