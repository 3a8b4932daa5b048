"""What a rank remembers of a save, so that the next one of the same tensors is not planned again."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from unishard.checkpoint.planning import Packed, Planning
from unishard.checkpoint.planning_process import PlanningProcess
from unishard.distributed import agreement

MANY = 100_000
"""Chunks from which on a child process pays: planning fewer and writing their index takes about a second."""

Key = tuple[int, Packed]
"""Bytes of a chunk, and what the rank holds."""

_logger = logging.getLogger("unishard")


class PlanCache:
    """The plan of the last save of an engine. It covers the tensors that are alike in each save: see `held.divided`.

    Args:
        background: The saves run beside a training. Then rank 0 plans large ones in a child process, from the first one
            until `close`.
    """

    def __init__(self, *, background: bool = False) -> None:
        self._plans = 0
        self._background = background
        self._process: PlanningProcess | None = None
        self.planning: Planning | PlanningProcess = Planning()
        """On rank 0: what plans, and keeps the plan."""
        self.forget()

    def forget(self) -> None:
        """Plan the next save anew, as after a failure, which ranks may notice at different points."""
        self._key: Key | None = None
        self._number = 0
        self.mask = b""
        """Which of its cuts this rank writes."""
        self.lengths: Any = None
        """Lengths of this rank's records."""

    def choose(self, chunks: int) -> None:
        """On rank 0, before a save: choose where to plan it. Without the child, the process itself plans, from then on.

        Args:
            chunks: About so many are to be planned.
        """
        if not self._background or (self._process is None and chunks < MANY):
            return
        try:
            if self._process is None:
                self._process = self.planning = PlanningProcess()
                self.forget()
                _logger.info("saves are planned in process %d", self._process.pid)
            self._process.require()
        except Exception as error:  # whatever it is: the other ranks wait for this one
            _logger.warning("%s; the process that trains plans its saves itself, which delays its steps", error)
            self._background = False
            self.close()
            self.forget()

    def close(self) -> None:
        """End the child process."""
        process, self._process, self.planning = self._process, None, Planning()
        if process is not None:
            process.close()

    def fits(self, key: Key, group: dist.ProcessGroup | None) -> bool:
        """Whether all ranks hold what they held at the last save, and remember the same plan.

        Collective if there are ranks.
        """
        number = self._number if key == self._key else 0
        same = not dist.is_initialized() or agreement.equal(number, group)
        return same and number > 0

    def remember(self, key: Key, mask: bytes, lengths: Any) -> None:
        """Keep a plan that all ranks have carried out. Called on all of them, or on none."""
        self._plans += 1
        self._key, self._number = key, self._plans
        self.mask, self.lengths = mask, lengths
