"""Sizes and timing of collectives. None of these changes the maths."""

from __future__ import annotations

from pydantic import Field

from unishard.config.section import Section

__all__ = ["Communication"]


class Communication(Section):
    """Sizes and timing of collectives. None of these changes the maths."""

    reduce_bucket_size: int = Field(default=25_000_000, ge=1)
    """Elements of gradient that are reduced in one collective, where the engine uses buckets."""
    prefetch_bucket_size: int = Field(default=50_000_000, ge=0)
    """Elements of parameter that may be gathered ahead of their use (`full_shard`); 0 for no prefetch."""
    overlap: bool = Field(default=True)
    """Whether gradients are reduced while backward goes on, where the engine leaves the choice."""
    desync_check: bool = Field(default=True)
    """Whether the ranks compare notes before an engine's collective calls, in the first ten updates and in every tenth, so that
    different calls are one error that names who is where, and no hang."""
    desync_timeout: float = Field(default=10.0, gt=0, le=1800)
    """Seconds within which that error comes. A rank that is only late, outside unishard, is named in a warning after them and
    waited for."""
