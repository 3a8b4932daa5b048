"""Reads Lightning's arguments from a file, and writes them as Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Key
from unishard.contract.render import Rendered
from unishard.formats.format import Format
from unishard.formats.launching import Launch
from unishard.formats.lightning.keys import BESIDE, OLDER, TRAINER
from unishard.formats.lightning.reading import LightningDocument
from unishard.formats.lightning.recipe_keys import OPTIMIZER
from unishard.formats.lightning.rules import FSDP
from unishard.formats.lightning.snippet import snippet
from unishard.formats.lightning.strategy_arguments import TOOL
from unishard.formats.lightning.writing import expressed
from unishard.formats.reading import ReadDocument, assemble
from unishard.formats.signs import Explained, by_entries
from unishard.formats.source import Source

__all__ = ["FORMAT"]


class LightningFormat(Format):
    """Reads YAML and JSON, writes Python."""

    name = "lightning"
    tool = TOOL
    suffix = ".py"
    keys: Mapping[str, Key] = {
        **TRAINER,
        **OLDER,
        **BESIDE,
        **{f"optimizer.init_args.{name}": row for name, row in OPTIMIZER.items()},
    }
    rules = FSDP

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What the arguments say: those of the Trainer or of Fabric, of the strategy, and LightningCLI's keys around
        them.

        Raises:
            ConfigError: An override cannot be used.
        """
        document, changes = LightningDocument.of(source, topology), tuple(overrides)
        entries = document.entries()
        if any(change.partition("=")[0].strip() == "backend" for change in changes):
            entries = [document.without_its_class(entry) for entry in entries]
        return assemble(self.name, source, entries, overrides=changes, topology=document.topology)

    def explained(self, source: Source) -> Explained:
        """How many of the Trainer's arguments are known; sections beside them are the user's own classes."""
        document = LightningDocument.of(source, None)
        return by_entries(entry for entry in document.entries() if document.speaks_for_lightning(entry))

    def launch(self, reading: ReadDocument) -> Launch:
        """Devices and nodes of the Trainer; Lightning starts the processes of one node itself."""
        ranks = reading.topology
        return (
            Launch(ranks.world_size // ranks.local_world_size, ranks.local_world_size)
            if ranks and ranks.world_size > 1
            else Launch()
        )

    def write(self, reading: ReadDocument, topology: Topology) -> Rendered:
        """LightningCLI's sections, from which the Python is rendered."""
        return expressed(reading, topology)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """Python: the strategy, the Trainer, and what must be mixed into the LightningModule."""
        return snippet(document, reading)


FORMAT = LightningFormat()
