"""Refuse a model that computes something else when ranks have parts of it, before the first update."""

from __future__ import annotations

from unishard.engine.guards.guard import Guard
from unishard.failures.compared_call import ComparedCall
from unishard.parallel.sliced_model import SlicedModel


class CutBlocks(Guard):
    """Lets the first step prove what the first forward has called, when its activations are freed.

    Without it: attention over parts of heads, norms over parts of features, gradients of parts.
    """

    def __init__(self, sliced: SlicedModel) -> None:
        """Look until everything is proved."""
        self._sliced = sliced

    def before_step(self, call: ComparedCall) -> None:
        """Prove what was called and is not proved yet. Collective then."""
        self._sliced.prove()
