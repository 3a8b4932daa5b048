"""DeepSpeed ZeRO 0 to 3 as a backend of unishard. Importing it imports neither torch nor deepspeed."""

from __future__ import annotations

from unishard_deepspeed.backend import DeepSpeedBackend

__all__ = ["backend"]

backend = DeepSpeedBackend()
