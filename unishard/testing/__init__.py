"""Test tools for authors of engines and models: local ranks, an oracle in plain torch, and the conformance suite."""

from __future__ import annotations

from unishard.testing.ranks import RankError, RankFailure, run_ranks

__all__ = ["RankError", "RankFailure", "run_ranks"]
