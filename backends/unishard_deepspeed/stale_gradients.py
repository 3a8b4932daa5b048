"""Zero stale gradients, which DeepSpeed would apply again: it overwrites only gradients that a micro-batch or window
used.
"""

from __future__ import annotations

from typing import Any

from unishard.contract.private_api import PrivateApi
from unishard_deepspeed.private import PRIVATE_API
from unishard_deepspeed.private.updates import clear_stale_gradients
from unishard_deepspeed.private.window import clear_offloaded
from unishard_deepspeed.spec import ZeroSpec


class StaleGradients:
    """Gradients of the last window that remain in an optimizer.

    Which parameters the next window uses is not known in advance. So all are zeroed after each update, if DeepSpeed has
    the private names for it; if not, only runs that do not use a parameter are refused.
    """

    def __init__(self, spec: ZeroSpec, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._kind = spec.kind
        self._kept = PRIVATE_API["stale-gradients"] if self._kind == "stage-3" else None
        self._offloaded = PRIVATE_API[f"stale-offloaded-{self._kind}"] if spec.offloads_optimizer else None
        self.missing: list[PrivateApi] = [
            patch for patch in (self._kept, self._offloaded) if patch is not None and not patch.works
        ]
        """Patches for gradients that cannot be zeroed, because DeepSpeed lacks a private name."""

    def clear(self, *, updated: bool = True) -> None:
        """Zero stale gradients after an update.

        Args:
            updated: Whether it was made.

        Raises:
            BackendError: It was skipped, DeepSpeed would then skip all later ones, and it lacks the private names to
                prevent that.
        """
        if self._kept is not None and self._kept not in self.missing:
            clear_stale_gradients(self._optimizer)
        if self._offloaded is not None and self._offloaded not in self.missing:
            clear_offloaded(self._optimizer, self._kind)
        elif self._offloaded is not None and not updated:
            self._offloaded.require()
