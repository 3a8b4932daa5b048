"""What an engine knows of its process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["Process"]


class Process:
    """The base of engines: this process among those of the run. Nothing here is collective."""

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
        """Whether this is rank 0, which logs and writes what only one process should.

        Make collective calls on every rank.
        """
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only; above the progress bar if one is shown. Not collective.

        Args:
            values: As for the built-in `print`. They are computed on every rank: `engine.print(engine.mean(loss))` is
                right.
            options: Keyword arguments of the built-in `print`.
        """
        if self.is_main:
            print(*values, **options)  # noqa: T201 (what the method is for)
