"""Zero stale gradients, which DeepSpeed would apply again: it overwrites only gradients that a micro-batch or window
used.
"""

from __future__ import annotations

from typing import final

from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


@final
class StaleGradients(ZeroCase):
    """Gradients of the last window that remain in an optimizer.

    Which parameters the next window uses is not known in advance. So all are zeroed after each update, if DeepSpeed has
    the private names for it; if not, only runs that do not use a parameter are refused.
    """

    def __init__(self, zero: ZeroOptimizer) -> None:
        stale = zero.stale()
        self.missing = [case for case in stale if not case.works]
        """Cases of gradients that cannot be zeroed, because DeepSpeed lacks a private name."""
        self._zeroing = [clear for case, clear in stale.items() if case not in self.missing]
        self._skipping = [case for case in self.missing if case is zero.cases.stale_offloaded]

    def end_window(self, *, skipped: bool) -> None:
        """Zero them.

        Raises:
            BackendError: The update was skipped, DeepSpeed would then skip all later ones, and it lacks the private
                names to prevent that.
        """
        for clear in self._zeroing:
            clear()
        for case in self._skipping if skipped else ():
            case.require()
