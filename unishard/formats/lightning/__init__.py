"""Arguments of Lightning's Trainer, Fabric and LightningCLI as a file; written as Python."""

from __future__ import annotations

from unishard.formats.lightning.format import LightningFormat

__all__ = ["FORMAT"]

FORMAT = LightningFormat()
