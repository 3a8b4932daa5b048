"""Files of `accelerate config`, which `accelerate launch --config_file` reads."""

from __future__ import annotations

from unishard.formats.accelerate.format import AccelerateFormat

__all__ = ["FORMAT"]

FORMAT = AccelerateFormat()
