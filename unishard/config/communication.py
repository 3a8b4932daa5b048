"""Sizes and timing of collectives. No field here changes the results."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from unishard.config.relevance import OnlyWith
from unishard.config.section import Section
from unishard.config.sharding import GATHERING

_PREFETCHING = OnlyWith(
    {"sharding.strategy": GATHERING},
    "nothing is prefetched",
    "is unused with {self.sharding.strategy}, which does not prefetch; remove it or choose full_shard",
)
_CHECKED = OnlyWith({"desync_check": (True,)}, "desync_check is off")


class Communication(Section):
    """Sizes and timing of collectives. No field here changes the results."""

    reduce_bucket_size: int = Field(default=25_000_000, ge=1)
    """Gradient elements reduced in one collective, on engines that use buckets."""
    prefetch_bucket_size: Annotated[int | None, _PREFETCHING] = Field(default=None, ge=0)
    """Parameter elements that may be gathered before they are used (`full_shard`). `null` for those of the next unit,
    whatever its size; 0 disables prefetching."""
    overlap: bool = Field(default=True)
    """Whether gradients are reduced during backward, where the engine has this option."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that ranks wait for a late one, in a call of the engine or in any collective of its process groups, until
    the run ends. `null` for 30 minutes, or for the timeout of a process group that the script or a framework has
    started."""
    desync_check: bool = Field(default=True)
    """Whether to check that all ranks make the same collective calls: one by one in the first ten updates, then all
    calls so far where every tenth update begins, before its step, and before a save. On a mismatch, every rank raises
    an error that names each rank's call, instead of hanging."""
    desync_timeout: Annotated[float, _CHECKED] = Field(default=10.0, gt=0, le=1800)
    """Seconds until that error is raised. A rank that is late outside unishard is named in a warning instead, and
    waited for."""
