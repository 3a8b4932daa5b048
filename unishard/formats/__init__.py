"""Config files of other tools: read, written, and translated into each other through the one config."""

from __future__ import annotations

from unishard.formats.catalog import NAMES
from unishard.formats.reading import Reading
from unishard.formats.translating import Item, Outcome, read, translate

__all__ = ["NAMES", "Item", "Outcome", "Reading", "read", "translate"]
