"""Units that were gathered ahead, and that no forward has used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.private.gathers import end_gathers


@final
class PrefetchedUnits(FSDPCase):
    """Drops what they hold when all are sharded. A run has it that prefetches.

    The last unit that runs prefetches the one that comes after it in the model. Where that has run before, it waits for
    the next forward, which would use it after weights were written; only a backward drops it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def before_reshard(self) -> None:
        """Wait for their gathers."""
        end_gathers(self._modules)
