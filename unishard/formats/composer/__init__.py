"""Config files of llm-foundry, which hands them to Composer's Trainer, and MosaicML's run files around them."""

from __future__ import annotations

from unishard.formats.composer.format import ComposerFormat

__all__ = ["FORMAT"]

FORMAT = ComposerFormat()
