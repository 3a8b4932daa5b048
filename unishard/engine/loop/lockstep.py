"""Run ranks with different numbers of forwards in lockstep: finished ranks replay their last call until every rank is
done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from unishard.data.batches import to_device
from unishard.errors import RankMismatchError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
_KINDS = ("forward", "generate")


class Lockstep:
    """The turns of one `lockstep` block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[str, Call] = {}
        self.taken = 0

    def take(self, kind: str | None, call: Call | None) -> tuple[str, Call] | None:
        """Take the next turn. Collective.

        Args:
            kind: What this rank calls; None if it has nothing left to call.
            call: The arguments.

        Returns:
            The call for this turn: this rank's own, or one to repeat; None when all ranks are done.

        Raises:
            RankMismatchError: On every rank: one rank calls the model and another one `generate`.
        """
        self.taken += 1
        if kind is not None and call is not None:
            self._last[kind] = call
        state = [0 if kind is None else 1 + _KINDS.index(kind), *(name in self._last for name in _KINDS)]
        rows = [torch.empty(len(state), dtype=torch.int64, device=self._device) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, torch.tensor(state, dtype=torch.int64, device=self._device))
        states = [row.tolist() for row in rows]
        callers = {number: [rank for rank, (called, *_) in enumerate(states) if called == number] for number in (1, 2)}
        if callers[1] and callers[2]:
            raise RankMismatchError(
                f"in turn {self.taken} of engine.lockstep ranks {callers[1]} call the model and ranks {callers[2]} "
                "call generate; use a separate block for each"
            )
        number = 1 if callers[1] else 2
        if not callers[number]:
            return None
        chosen = _KINDS[number - 1]
        if not all(has_call[number] for has_call in states):
            self._share_call(chosen, callers[number][0])
        return chosen, self._last[chosen]

    def _share_call(self, kind: str, source: int) -> None:
        """Share one rank's call with ranks that have none to repeat. Collective."""
        shared = [to_device(self._last[kind], torch.device("cpu")) if dist.get_rank() == source else None]
        dist.broadcast_object_list(shared, source)
        if kind not in self._last:
            self._last[kind] = to_device(shared[0], self._device)
