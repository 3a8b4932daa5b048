"""Find what mixes positions of a sequence of which each rank has a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unishard.contract.adapter import EngineAdapter
from unishard.engine.guards.guard import Guard
from unishard.sequence.split_sequences import SplitSequences


class MixedPositions(Guard):
    """Refuses a model in which something other than attention looks at other positions, at its first forward.

    Without it: a convolution, a state space or a pooling head sees only this rank's part, and trains wrongly in
    silence.
    """

    def __init__(self, adapter: EngineAdapter, sequences: SplitSequences) -> None:
        self._adapter, self._sequences = adapter, sequences

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """Prove it before the first one."""
        args, kwargs = inputs
        self._sequences.prove(self._adapter.forward, args, kwargs)
        yield
