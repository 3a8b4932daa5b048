"""The content of a config file before validation: plain data with the line of every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unishard.config.loading.origins import Keys, Origin, Origins
from unishard.config.loading.validation import Finding
from unishard.config.loading.values import plain
from unishard.errors import ConfigError, Problem


@dataclass(slots=True)
class Document:
    """The content of a config file before validation."""

    data: Any
    origins: Origins
    findings: list[Finding] = field(default_factory=list)
    repeats: list[Finding] = field(default_factory=list)
    """Duplicate keys in another tool's file; its reader takes the last one."""
    octal: dict[Keys, int] = field(default_factory=dict)
    """Numbers with a leading zero in another tool's file, as YAML 1.2 reads them: `010` is 8 in its data, as YAML 1.1
    reads it, and 10 here."""


def from_mapping(source: Mapping[str, Any]) -> Document:
    """Make a document from a mapping."""
    document = Document(None, Origins(Origin("")))
    document.data = plain(source, (), document.findings)
    return document


def section_of(document: Document, name: str) -> Document:
    """The section of a file that has more than a config, as a document.

    Args:
        document: The whole file, in which only the section has to be what a config may contain.
        name: Dotted name of the section.

    Raises:
        ConfigError: The file has no such section.
    """
    keys = tuple(name.split("."))
    data = document.data
    for depth, key in enumerate(keys):
        if not isinstance(data, Mapping) or key not in data:
            known = f"; it has {', '.join(map(str, data))}" if isinstance(data, Mapping) and data else ""
            raise ConfigError(
                [
                    Problem(
                        "",
                        f"has no section {'.'.join(keys[: depth + 1])!r}{known}",
                        str(document.origins.of(keys[:depth])),
                    )
                ]
            )
        data = data[key]
    if not isinstance(data, Mapping):
        raise ConfigError([Problem("", f"has no fields in the section {name!r}", str(document.origins.of(keys)))])
    findings = [
        found._replace(path=found.path[len(keys) :]) for found in document.findings if found.path[: len(keys)] == keys
    ]
    return Document(data, document.origins.below(keys), findings)


def without_own_sections(document: Document) -> Document:
    """The document without the top-level keys `x-...`, which are the user's own; they may contain anything."""
    if not isinstance(document.data, Mapping):
        return document
    own = {key for key in document.data if key.startswith("x-")}
    data = {key: value for key, value in document.data.items() if key not in own}
    return Document(
        data, document.origins, [found for found in document.findings if not own.intersection(found.path[:1])]
    )
