"""What a rare case adds to the calls of a model on DeepSpeed."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


class ZeroCase:
    """Called for each call of the model, in the order of the run's list; by default it does nothing. All are
    collective.
    """

    def before_forward(self) -> None:
        """Called before each forward."""

    def after_backward(self, kept: Collection[nn.Parameter]) -> None:
        """Called after each backward.

        Args:
            kept: Parameters that stay gathered.
        """

    def updated(self) -> None:
        """Called after an update that was not skipped."""

    def end_window(self, *, skipped: bool) -> None:
        """Called after an update, `skipped` or not, or when a window is dropped."""

    def partitioned(self) -> None:
        """Called between two calls of the engine, after parameters were partitioned."""

    def written(self) -> None:
        """Called after weights were written in place."""
