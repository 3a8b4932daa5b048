"""Config files of other tools: read, written, and translated into each other through the one config.

A format knows which engines its tool drives; the rest of the core knows no engine by name.
"""

from __future__ import annotations

from unishard.formats.catalog import NAMES
from unishard.formats.checking import check
from unishard.formats.items import Item
from unishard.formats.reading import ReadDocument
from unishard.formats.translating import Outcome, read, translate

__all__ = ["NAMES", "Item", "Outcome", "ReadDocument", "check", "read", "translate"]
