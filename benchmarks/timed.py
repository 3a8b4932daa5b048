"""The time of one update of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["timed"]


def timed(update: Callable[[], Any]) -> float:
    """Milliseconds of one update, from a common start to the end of the slowest rank's. Collective."""
    dist.barrier()
    start = time.perf_counter()
    update()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item() * 1e3
