"""From a dataset to batches on the device: each rank's share, accumulation windows, the progress bar."""

from __future__ import annotations

from unishard.data.loader import dataloader

__all__ = ["dataloader"]
