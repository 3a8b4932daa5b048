"""The second copy of the parameters that stage 3 keeps in smaller groups of ranks (hpZ)."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import nn

from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.private.second_copy import drop_second_copies


@final
class SecondCopies(ZeroCase):
    """DeepSpeed drops it after an update of its own."""

    def __init__(self, model: nn.Module, reshard_all: Callable[[], None]) -> None:
        """Drop what was made of rounded weights.

        Args:
            model: Given to DeepSpeed already.
            reshard_all: Partitions all parameters.
        """
        self._model, self._reshard_all = model, reshard_all
        drop_second_copies(model.parameters())

    def written(self) -> None:
        """Drop it, after what is gathered, or under way, has become one."""
        self._reshard_all()
        drop_second_copies(self._model.parameters())
