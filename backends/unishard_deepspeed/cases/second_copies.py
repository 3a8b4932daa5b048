"""The second copy of the parameters that stage 3 keeps in smaller groups of ranks (hpZ)."""

from __future__ import annotations

from typing import final

from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.private.second_copy import drop_second_copies
from unishard_deepspeed.private.zero_parameters import ZeroParameters


@final
class SecondCopies(ZeroCase):
    """DeepSpeed drops it after an update of its own."""

    def __init__(self, zero: ZeroParameters) -> None:
        """Drop what was made of rounded weights."""
        self._zero = zero
        self._drop()

    def written(self) -> None:
        """Drop it, after what is gathered, or under way, has become one."""
        self._zero.reshard_all()
        self._drop()

    def _drop(self) -> None:
        drop_second_copies(self._zero.engine.module.parameters())
