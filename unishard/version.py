"""The version, where every room can have it. The same stands in pyproject.toml."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
