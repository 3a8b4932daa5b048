"""Data loading: each rank's share of a dataset, accumulation windows, batches on the device, the progress bar."""

from __future__ import annotations

from unishard.data.loader import dataloader

__all__ = ["dataloader"]
