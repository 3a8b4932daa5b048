"""Memory of this rank."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def memory_bytes(device: torch.device) -> int:
    """The device's peak allocated memory since the start; for a CPU the memory that this process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
