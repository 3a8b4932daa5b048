"""torchtitan's TOML files, which its releases up to 0.2 (2025) read; later ones are configured in Python."""

from __future__ import annotations

from unishard.formats.torchtitan.format import TorchtitanFormat

__all__ = ["FORMAT"]

FORMAT = TorchtitanFormat()
