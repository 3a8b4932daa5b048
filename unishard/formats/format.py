"""What a format of a tool offers: signs by which it is recognized, tables, a reader and a writer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.reading import ReadDocument
from unishard.formats.signs import Signs
from unishard.formats.source import Source
from unishard.mapping.entries import Key
from unishard.mapping.express import Expressed
from unishard.mapping.rules import Rule

__all__ = ["Deferred", "Format"]


class Format(Protocol):
    """A format of config files. Stateless; importing it imports neither torch nor the tool."""

    @property
    def name(self) -> str:
        """The word after `--from` and `--to`."""
        ...

    @property
    def tool(self) -> str:
        """Who reads such files, with the version that the tables describe, such as `Accelerate 1.15.0`."""
        ...

    @property
    def suffix(self) -> str:
        """Of its files, such as `.yaml`."""
        ...

    @property
    def signs(self) -> Signs:
        """What speaks for it in a document. Every format is asked for them, so they import no tables."""
        ...

    @property
    def keys(self) -> Mapping[str, Key]:
        """Its own keys, dotted; those that it hands on to an engine stand in that engine's table."""
        ...

    @property
    def expressions(self) -> Mapping[str, Rule]:
        """How it says each field of the config, one row for each leaf that it does not say in an engine's words."""
        ...

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What a document says. Pure but for files that the document names.

        Raises:
            ConfigError: An override cannot be used, or a file that the document names cannot be read.
        """
        ...

    def write(self, reading: ReadDocument, topology: Topology) -> Expressed:
        """The document that says `reading.config`, and what became of each field. Pure."""
        ...

    def render(self, document: Native, reading: ReadDocument) -> str:
        """The text of a document."""
        ...


class Deferred:
    """One of our own formats, whose tables, reader and writer are imported when somebody needs them.

    Args:
        name: Of the format, and of its folder.
        signs: What speaks for it.
    """

    def __init__(self, name: str, signs: Signs) -> None:
        self.name, self.signs = name, signs

    @cached_property
    def _whole(self) -> Any:
        return import_module(f"unishard.formats.{self.name}.format").FORMAT

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._whole, attribute)
