"""Let attention that runs again in backward see the sequence of which each rank has a part."""

from __future__ import annotations

from torch import Tensor

from unishard.engine.guards.guard import Guard
from unishard.failures.compared_call import ComparedCall
from unishard.sequence.split_sequences import SplitSequences


class RecomputedAttention(Guard):
    """Lets attention that runs again in backward see whole sequences.

    Without it: recomputed attention of a model of your own sees only this rank's part, and trains wrongly in silence.
    """

    def __init__(self, sequences: SplitSequences) -> None:
        self._sequences = sequences

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Enter the micro-batch again."""
        self._sequences.forward.enter()

    def after_backward(self) -> None:
        """Leave it."""
        self._sequences.forward.leave()

    def forget(self) -> None:
        """Leave it after a backward that did not end."""
        self._sequences.forward.leave()
