"""unishard's own YAML as one format among the others."""

from __future__ import annotations

from unishard.formats.unishard.format import UnishardFormat

__all__ = ["FORMAT"]

FORMAT = UnishardFormat()
