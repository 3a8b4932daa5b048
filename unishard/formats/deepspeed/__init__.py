"""The JSON file of `deepspeed.initialize`."""

from __future__ import annotations

from unishard.formats.deepspeed.format import DeepSpeedFormat

__all__ = ["FORMAT"]

FORMAT = DeepSpeedFormat()
