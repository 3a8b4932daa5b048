"""The runtime half: what every engine shares once torch is there."""

from __future__ import annotations

from unishard.engine.engine import TrainingEngine

__all__ = ["TrainingEngine"]
