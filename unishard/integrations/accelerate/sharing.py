"""How Accelerate counts ranks where groups of them share samples (`parallel.sequence`, `parallel.tensor`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils.data import RandomSampler

from unishard.config import Config
from unishard.config.data_share import data_share_of, shared_by
from unishard.config.topology import Topology
from unishard.distributed.nested_tensors import replace_tensors
from unishard.errors import ConfigError, Problem


class Sharing:
    """The groups of a run; without them, each rank is one."""

    def __init__(self, cfg: Config) -> None:
        """Look at the ranks that there are.

        Raises:
            ConfigError: The ranks of a group do not divide them.
        """
        state = PartialState()
        self.size = cfg.parallel.sharing
        self.field = shared_by(cfg.parallel.sequence.size, cfg.parallel.tensor.size)
        """Of the config, by which ranks share samples."""
        self._share = data_share_of(cfg, Topology(world_size=state.num_processes, rank=state.process_index))
        self.leads = state.process_index % self.size == 0
        """Whether this rank speaks for its group."""
        self._counting = False

    @property
    def on(self) -> bool:
        """Whether ranks share samples."""
        return self.size > 1

    @contextmanager
    def counting_groups(self) -> Iterator[None]:
        """A block in which ranks are counted as groups."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def number(self, ranks: int) -> int:
        """Of ranks, or of groups."""
        return self._share.of if self._counting else ranks

    def index(self, rank: int) -> int:
        """Of this rank, or of its group."""
        return self._share.number if self._counting else rank

    def require_own_reading(self, dispatches: Any) -> None:
        """Refuse one rank that reads for all.

        Raises:
            ConfigError: It is asked for.
        """
        if self.on and dispatches:
            what = f"reads on one rank for all, and does not know groups of {self.field}; write false"
            raise ConfigError([Problem("dispatch_batches", what)])

    def align(self, loader: Any) -> None:
        """Give a sampler that would draw from each rank's own random state one that is the same on all."""
        sampler = getattr(loader, "sampler", None)
        if self.on and isinstance(sampler, RandomSampler) and sampler.generator is None:
            seed = broadcast_object_list([int(torch.empty((), dtype=torch.int64).random_())])[0]
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(seed)

    def once(self, gathered: Any) -> Any:
        """What ranks have gathered, each group once."""
        return replace_tensors(gathered, self._once)

    def _once(self, tensor: Tensor) -> Tensor:
        ranks = tensor.reshape(dist.get_world_size(), -1, *tensor.shape[1:])
        return ranks[:: self.size].flatten(0, 1)
