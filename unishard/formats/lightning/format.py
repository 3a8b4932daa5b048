"""Reads Lightning's arguments from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key
from unishard.formats.format import Format
from unishard.formats.launching import Launch
from unishard.formats.lightning.document import LightningDocument, speaks_for_lightning
from unishard.formats.lightning.keys import BESIDE, REMOVED, TOOL, TRAINER
from unishard.formats.lightning.ranks import ranks_of
from unishard.formats.lightning.recipe_keys import OPTIMIZER
from unishard.formats.lightning.shape import Shape
from unishard.formats.markers import Coverage, by_entries
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source


class LightningFormat(Format):
    """The arguments of the Trainer or of Fabric, of the strategy, and LightningCLI's keys around them."""

    name = "lightning"
    tool = TOOL
    instead = "train with unishard.integrations.lightning or the unishard file"
    keys: Mapping[str, Key] = {
        **TRAINER,
        **REMOVED,
        **BESIDE,
        **{f"optimizer.init_args.{name}": row for name, row in OPTIMIZER.items()},
    }

    def ranks(self, source: Source) -> Topology | None:
        """Those that the Trainer's `devices` and `num_nodes` say."""
        return ranks_of(Shape.of(source.data).trainer_in(source.data))

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say."""
        return LightningDocument.of(source, topology).entries()

    def coverage(self, source: Source) -> Coverage:
        """How many of the Trainer's arguments are known; sections beside them are the user's own classes."""
        return by_entries(entry for entry in self.entries(source, self.ranks(source)) if speaks_for_lightning(entry))

    def launch(self, reading: ReadDocument) -> Launch:
        """Devices and nodes of the Trainer; Lightning starts the processes of one node itself."""
        ranks = reading.topology
        return (
            Launch(ranks.world_size // ranks.local_world_size, ranks.local_world_size)
            if ranks and ranks.world_size > 1
            else Launch()
        )


FORMAT = LightningFormat()
