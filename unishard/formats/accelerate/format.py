"""Reads and writes the files of `accelerate config`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.accelerate.expressions import FSDP_EXPRESSIONS
from unishard.formats.accelerate.keys import KEYS, TOOL
from unishard.formats.accelerate.reading import entries_of, ranks_of
from unishard.formats.accelerate.writing import expressed, text_of
from unishard.formats.reading import ReadDocument, assemble
from unishard.formats.source import Source
from unishard.mapping.entries import Key
from unishard.mapping.express import Expressed
from unishard.mapping.rules import Rule

__all__ = ["FORMAT"]


class AccelerateFormat:
    """Implements `unishard.formats.format.Format`."""

    name = "accelerate"
    tool = TOOL
    suffix = ".yaml"
    keys: Mapping[str, Key] = KEYS
    expressions: Mapping[str, Rule] = FSDP_EXPRESSIONS

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What a file says. Opens the file that `deepspeed_config_file` names.

        Raises:
            ConfigError: An override cannot be used.
        """
        ranks = topology or ranks_of(source.data)
        return assemble(self.name, source, entries_of(source, ranks), overrides=overrides, topology=ranks)

    def write(self, reading: ReadDocument, topology: Topology) -> Expressed:
        """A file for `accelerate launch --config_file`, and what became of each field.

        What the source leaves to its training script stays with it.

        Raises:
            ConfigError: Accelerate does not know the engine.
        """
        return expressed(reading, topology)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """YAML in the order of `accelerate config`."""
        return text_of(document)


FORMAT = AccelerateFormat()
