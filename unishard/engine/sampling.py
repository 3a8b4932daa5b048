"""When the guards of the loop look closely: the one place that says it.

What costs nothing, such as the versions of tensors, is looked at in every micro-batch. What waits for the device, or
runs a hook for each module, is looked at in the first updates, where a habit shows, and at random later.
"""

from __future__ import annotations

from zlib import crc32

_FIRST = 10
"""The updates after `prepare` of which every micro-batch is looked at."""
_EVERY = 40
"""Of so many later updates, one is looked at, in one of its micro-batches."""


class Sampling:
    """Chooses the micro-batches, the same on all ranks."""

    def __init__(self, seed: int) -> None:
        """Begin with the first update after `prepare`.

        Args:
            seed: The same on all ranks.
        """
        self._seed = seed
        self._update = 0
        self.all = True
        """Whether every micro-batch of the current update is looked at."""
        self.chosen: int | None = None
        """The only micro-batch of a later update that is looked at."""

    def next_update(self, window: int) -> bool:
        """Choose for the next update.

        Args:
            window: Its micro-batches.

        Returns:
            Whether any of these is looked at.
        """
        self._update += 1
        turn, place = divmod(self._update, _EVERY)
        draw = crc32(f"{self._seed} {turn}".encode())
        self.all = self._update < _FIRST
        self.chosen = draw // _EVERY % window if draw % _EVERY == place else None
        return self.all or self.chosen is not None
