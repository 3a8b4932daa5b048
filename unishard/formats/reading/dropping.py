"""Keys that are left out of a document on request, by name or glob, as if its author had not written them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from unishard.contract.entries import Entry, KeyEffect, Path
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem
from unishard.formats.files.source import Source


class DroppedKey(NamedTuple):
    """A key that was left out."""

    key: str
    value: Any
    line: int | None
    pattern: str
    """The pattern that matches it."""
    effect: str = ""
    """What the training does otherwise without it, in words."""


def drop_keys(source: Source, patterns: Sequence[str]) -> tuple[Source, list[DroppedKey]]:
    """The document without the keys that match, and without the blocks that this empties.

    Args:
        source: The document.
        patterns: Dotted keys, or globs of them such as `zero_optimization.stage3_*`. A key takes everything below it
            along.
    """
    if not patterns:
        return source, []
    dropped: list[DroppedKey] = []
    data = _without(source, source.data, _Patterns.of(patterns), (), dropped)
    return source._replace(data=data), dropped


def drop_entries(entries: Iterable[Entry], patterns: Sequence[str]) -> tuple[list[Entry], list[DroppedKey]]:
    """The entries, those that match said to be left out: of a file that the document names, or of a key that it lacks
    and needs.
    """
    kept, dropped, wanted = [], [], _Patterns.of(patterns)
    for entry in entries:
        refused = entry.effect.fit is Fit.UNSUPPORTED
        pattern = wanted.match(entry.path) if refused or not entry.assumed else None
        if pattern is None:
            kept.append(entry)
            continue
        dropped.append(DroppedKey(entry.key, entry.value, None, pattern))
        kept.append(entry._replace(effect=KeyEffect(Fit.IGNORED, f"dropped (--drop {pattern})")))
    return kept, dropped


def check_used(patterns: Iterable[str], dropped: Iterable[DroppedKey], source: Source) -> None:
    """Refuse a pattern that matches nothing, which is a slip of the pen.

    Raises:
        ConfigError: One matches no key.
    """
    used = {one.pattern for one in dropped}
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        message = "matches no key; name one as the report does, such as zero_optimization.stage3_*"
        raise ConfigError([Problem(f"--drop {pattern}", message, source.name) for pattern in unused])


def _without(
    source: Source, data: Mapping[str, Any], patterns: _Patterns, above: Path, dropped: list[DroppedKey]
) -> Mapping[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in data.items():
        path = (*above, name)
        if pattern := patterns.match(path):
            dropped += _leaves(source, path, value, pattern)
        elif isinstance(value, Mapping) and value:
            inner = _without(source, value, patterns, path, dropped)
            if inner:
                kept[name] = inner
        else:
            kept[name] = value
    return kept


def _leaves(source: Source, path: Path, value: Any, pattern: str) -> Iterator[DroppedKey]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(source, (*path, name), item, pattern)
    else:
        yield DroppedKey(".".join(path), value, source.origins.of(path).line, pattern)


class _Patterns(NamedTuple):
    """What is dropped. Keys are looked up, since a remedy may name thousands."""

    keys: frozenset[str]
    globs: tuple[str, ...]

    @classmethod
    def of(cls, patterns: Iterable[str]) -> _Patterns:
        every = tuple(patterns)
        return cls(frozenset(every), tuple(pattern for pattern in every if set(pattern) & set("*?[")))

    def match(self, path: Path) -> str | None:
        """The pattern of a path: its own key, or that of a block around it."""
        names = [".".join(path[: at + 1]) for at in range(len(path))]
        exact = next((name for name in names if name in self.keys), None)
        return exact or next((pattern for pattern in self.globs for name in names if fnmatchcase(name, pattern)), None)
