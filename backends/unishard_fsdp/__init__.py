"""The PyTorch backend: FSDP2's `fully_shard`, `replicate` and DistributedDataParallel.

Importing it does not import torch.
"""

from __future__ import annotations

from unishard_fsdp.backend import FSDPBackend

__all__ = ["backend"]

backend = FSDPBackend()
"""The object of the entry point `fsdp` in the group `unishard.backends`."""
