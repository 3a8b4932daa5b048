"""What a format of a tool offers: markers by which it is recognized, tables, a reader and a writer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, Path
from unishard.contract.render import RenderedDocument
from unishard.contract.rules import Rule
from unishard.errors import ConfigError
from unishard.formats.files.documents import yaml_text
from unishard.formats.files.source import Source
from unishard.formats.launch.processes import Launch
from unishard.formats.markers import Coverage, Markers, by_entries
from unishard.formats.reading.document import ReadDocument, assemble


class Format:
    """A format of config files. Stateless; importing it imports neither torch nor the tool.

    A subclass sets the attributes, and defines `entries` (or `read`) and `write`.
    """

    name: str
    """The word after `--from` and `--to`."""
    tool: str
    """Who reads such files, with the version that the tables describe, such as `Accelerate 1.15.0`."""
    suffix: str = ".yaml"
    """Of its files."""
    markers: Markers = Markers({})
    """What speaks for it in a document. Every format is asked for them, so they import no tables: see `Deferred`."""
    keys: Mapping[str, Key] = {}
    """Its own keys, dotted; those that it hands on to an engine stand in that engine's table."""
    rules: Mapping[str, Rule] = {}
    """How it says each field of the config, one row for each leaf that it does not say in an engine's words."""
    read_only: bool = False
    """Whether such files are read and never written; a subclass then defines no `write`."""
    instead: str = "train with the unishard file"
    """What to do in place of writing such a file, where it is only read."""
    yaml_1_1: bool = False
    """Whether the tool reads YAML 1.1."""
    engine: str = ""
    """The engine that the tool drives, where that is one."""
    fills_auto: bool = False
    """Whether the tool hands configs to DeepSpeed, and fills in their `"auto"` before."""

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What a document says. Pure but for files that the document names.

        Raises:
            ConfigError: An override cannot be used, or a file that the document names cannot be read.
        """
        topology = topology or self.ranks(source)
        entries = self.entries(source, topology)
        return assemble(self.name, source, entries, overrides=overrides, topology=topology, fills_auto=self.fills_auto)

    def coverage(self, source: Source) -> Coverage:
        """How much of a document the format knows, by which it is recognized."""
        try:
            return by_entries(self.read(source).entries)
        except ConfigError:
            return Coverage(1.0)  # whoever reads it gets the error

    def ranks(self, source: Source) -> Topology | None:
        """The ranks that a document asks for; None if it does not say."""
        return None

    def stays_in_place(self, source: Source) -> bool:
        """Whether a document that is written for its own tool again has its keys where they are."""
        return True

    def for_trainer(self, source: Source) -> tuple[Mapping[str, Any], Path | None]:
        """The arguments of TrainingArguments that a document takes the place of, and the path of DeepSpeed's own config
        in it.
        """
        return {}, None

    def launch(self, reading: ReadDocument) -> Launch:
        """What a document says about its processes."""
        return Launch()

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What a document says, one entry for each key and for each default that must be said."""
        raise NotImplementedError

    def wants(self, document: Native) -> str:
        """What must be added to a document before its tool takes it; empty for nothing."""
        return ""

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """The document that says `reading.config`, and what became of each field. Pure."""
        raise NotImplementedError

    def render(self, document: Native, reading: ReadDocument) -> str:
        """The text of a document; YAML unless a format says otherwise."""
        return yaml_text(document, old=self.yaml_1_1)


class Deferred:
    """One of our own formats, whose tables, reader and writer are imported when they are needed.

    Args:
        name: Of the format, and of its folder.
        markers: What speaks for it.
        read_only: Whether its files are read and never written.
    """

    def __init__(self, name: str, markers: Markers, *, read_only: bool = False) -> None:
        self.name, self.markers, self.read_only = name, markers, read_only

    @cached_property
    def _format(self) -> Any:
        return import_module(f"unishard.formats.{self.name}.format").FORMAT

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._format, attribute)
