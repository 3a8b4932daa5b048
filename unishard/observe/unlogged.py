"""Says once that values are logged, and written nowhere."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from unishard.observe.observer import Observer

_logger = logging.getLogger("unishard")


class Unlogged(Observer):
    """Stands where a config names no destination; on rank 0."""

    def __init__(self) -> None:
        self._told = False

    def on_log(self, values: Mapping[str, float | Tensor]) -> None:
        """Say it the first time."""
        if not self._told:
            self._told = True
            _logger.warning(
                "engine.log(%s): logging.to names no destination, so nothing is written; set it, as in `logging: "
                "[progress]`, or to [] to have this not said",
                ", ".join(f"{name}=..." for name in values),
            )
