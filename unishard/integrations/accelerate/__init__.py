"""Accelerate's `Accelerator` on either engine."""

from __future__ import annotations

from unishard.integrations.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
