"""The state of a micro-batch."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The state of a micro-batch."""

    OPEN = "open"
    FORWARD_DONE = "forward done"
    BACKWARD_DONE = "backward done"
    CLOSED = "closed"
