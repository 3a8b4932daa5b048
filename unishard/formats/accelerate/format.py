"""Reads and writes the files of `accelerate config`."""

from __future__ import annotations

from collections.abc import Sequence

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.accelerate.keys import KEYS, TOOL
from unishard.formats.accelerate.launch import launch_of
from unishard.formats.accelerate.reading import entries_of, ranks_of
from unishard.formats.accelerate.rules import FSDP_RULES
from unishard.formats.accelerate.writing import expressed, text_of
from unishard.formats.format import Format
from unishard.formats.launching import Launch
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source
from unishard.mapping.entries import Entry
from unishard.mapping.express import Expressed

__all__ = ["FORMAT"]


class AccelerateFormat(Format):
    """Files of `accelerate config`."""

    name = "accelerate"
    tool = TOOL
    keys = KEYS
    rules = FSDP_RULES
    fills_auto = True

    def ranks(self, source: Source) -> Topology | None:
        """Processes and machines that the file names."""
        return ranks_of(source.data)

    def launch(self, reading: ReadDocument) -> Launch:
        """Processes, machines, ports and GPUs that the file names."""
        return launch_of(reading.source.data, reading.topology)

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What a file says. Opens the file that `deepspeed_config_file` names."""
        return entries_of(source, topology)

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
