"""What the author of an engine, or of a model, tests with: local ranks, an oracle in plain torch, and the conformance suite."""

from __future__ import annotations

from unishard.testing.ranks import RankError, RankFailure, run_ranks

__all__ = ["RankError", "RankFailure", "run_ranks"]
