"""What a destination of `logging.to` supplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Values = Mapping[str, float]
"""Numbers by name, such as `loss` and `tokens_per_second`."""


class Writer(Protocol):
    """Writes records on rank 0. A writer may raise: the run goes on without it, with a warning."""

    def write(self, step: int, values: Values) -> None:
        """Write a record.

        Args:
            step: Optimizer steps since the start of the training. The same step may come again, with other names.
            values: Its numbers.
        """

    def resume(self, step: int) -> None:
        """Prepare to go on after this step of an earlier run, or of this one: later ones are written again."""

    def close(self) -> None:
        """Write what is buffered and release the files. Called once."""
