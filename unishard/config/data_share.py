"""Which share of the data a rank reads; ranks that share samples read the same.

Imports neither torch nor an engine.
"""

from __future__ import annotations

from typing import NamedTuple

from unishard.config import Config
from unishard.config.describe import count_of
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem


class DataShare(NamedTuple):
    """One of equal shares of the data."""

    number: int
    """Which one a rank reads, from 0."""
    of: int
    """How many there are: as many as ranks, or as groups that share samples."""


def data_share_of(cfg: Config, topology: Topology) -> DataShare:
    """The share of a rank.

    Raises:
        ConfigError: `parallel.sequence.size` does not divide the ranks.
    """
    size, world = cfg.parallel.sequence.size, topology.world_size
    if world % size:
        fitting = [str(number) for number in range(2, world + 1) if world % number == 0]
        instead = f"write {' or '.join(fitting)}, or start another number of ranks" if fitting else "start more ranks"
        message = f"is {size}, which does not divide {count_of(world, 'rank')}; {instead}"
        raise ConfigError([Problem("parallel.sequence.size", message)])
    return DataShare(topology.rank // size, world // size)
