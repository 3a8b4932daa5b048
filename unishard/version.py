"""The version, where every room can have it. The same stands in pyproject.toml."""

from __future__ import annotations

__version__ = "0.1.0"
