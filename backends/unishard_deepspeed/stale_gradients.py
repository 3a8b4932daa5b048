"""Zeroes the gradients that DeepSpeed would apply again: it overwrites those alone that a micro-batch, or a window, has used."""

from __future__ import annotations

from typing import Any

from unishard.config import Config
from unishard.patches import Patch
from unishard_deepspeed.patches import PATCHES
from unishard_deepspeed.patches.optimizer_kind import kind_of
from unishard_deepspeed.patches.shards import clear_offloaded
from unishard_deepspeed.patches.updates import clear_stale_gradients

__all__ = ["StaleGradients"]


class StaleGradients:
    """What of the last window is left in an optimizer.

    Which parameters the next window uses is not known before it. So all is zeroed after each update, where DeepSpeed has the names
    for it; where it has not, only a run that leaves a parameter out is refused.
    """

    def __init__(self, cfg: Config, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._kind = kind_of(cfg)
        self._kept = PATCHES["stale-gradients"] if self._kind == "stage-3" else None
        self._offloaded = PATCHES[f"stale-offloaded-{self._kind}"] if cfg.offload.optimizer != "none" else None
        self.broken: list[Patch] = [patch for patch in (self._kept, self._offloaded) if patch is not None and not patch.works]
        """What cannot be zeroed."""

    def clear(self, *, updated: bool = True) -> None:
        """After an update.

        Args:
            updated: Whether it was made.

        Raises:
            BackendError: It was left out, which DeepSpeed would do with all that follow, and it has not the names for it.
        """
        if self._kept is not None and self._kept not in self.broken:
            clear_stale_gradients(self._optimizer)
        if self._offloaded is not None and self._offloaded not in self.broken:
            clear_offloaded(self._optimizer, self._kind)
        elif self._offloaded is not None and not updated:
            self._offloaded.require()
