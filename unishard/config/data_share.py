"""Which share of the data a rank reads; ranks that share samples read the same.

Neighboring ranks have layers together (`parallel.tensor`), then sequences (`parallel.sequence`).

Imports neither torch nor an engine.
"""

from __future__ import annotations

from typing import NamedTuple

from unishard.config import Config
from unishard.config.shard_groups import require_divides
from unishard.config.topology import Topology


class DataShare(NamedTuple):
    """One of equal shares of the data."""

    number: int
    """Which one a rank reads, from 0."""
    of: int
    """How many there are: as many as ranks, or as groups that share samples."""


def data_share_of(cfg: Config, topology: Topology) -> DataShare:
    """The share of a rank.

    Raises:
        ConfigError: The ranks that share samples do not divide all ranks.
    """
    size = cfg.parallel.sharing
    require_divides(shared_by(cfg.parallel.sequence.size, cfg.parallel.tensor.size), size, topology)
    return DataShare(topology.rank // size, topology.world_size // size)


def shared_by(sequence: int, tensor: int) -> str:
    """The fields by which ranks share samples, from their sizes."""
    sizes = {"parallel.sequence.size": sequence, "parallel.tensor.size": tensor}
    return " x ".join(name for name, size in sizes.items() if size > 1)
