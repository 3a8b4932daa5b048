"""One process among the ranks of a run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Process:
    """What a process is among the ranks, as an engine shows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def rank(self) -> int:
        """This process among all of the run, from 0."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes what only one process should; not to guard collective calls."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only, as the built-in `print`; above the progress bar if one is shown. Not collective.

        The values are computed on every rank: `engine.print(engine.mean(loss))` is right.
        """
        if self.is_main:
            print(*values, **options)  # noqa: T201 (what the method is for)
