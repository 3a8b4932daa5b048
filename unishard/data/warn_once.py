"""Warns once, at the line of the user's loop."""

from __future__ import annotations

import inspect
import warnings

_BETWEEN = ("unishard.", "contextlib")
"""Modules between the user's line and a warning."""


class WarnOnce:
    """Issues each message once, as a warning of the first caller outside unishard."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, message: str) -> None:
        """Warn, unless this message was issued before."""
        if message in self._said:
            return
        self._said.add(message)
        frame, level = inspect.currentframe(), 1
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            frame, level = frame.f_back, level + 1
        warnings.warn(message, UserWarning, stacklevel=level)
