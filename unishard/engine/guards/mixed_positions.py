"""Find what mixes positions of a sequence of which each rank has a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from unishard.contract.adapter import ShardedModel
from unishard.engine.guards.guard import Guard
from unishard.engine.guards.perturbed_weights import perturbed_weights
from unishard.engine.open_blocks import OpenBlocks
from unishard.engine.place import LoopPlace
from unishard.sequence.split_sequences import SplitSequences

_APART = 8
"""Updates between two looks, at most; before, as many as there were until the first of them."""


class MixedPositions(Guard):
    """Refuses a model in which something other than attention looks at other positions.

    Before the first forward with weights of which none is zero, for those that begin there; later, at the beginning of
    windows that `Sampling` chooses, with those of the model: whether other tokens elsewhere change anything. Such a
    look costs two forwards, so of the first updates it takes the second, the third, the fifth and the ninth.

    Without it: a convolution, a state space or a pooling head sees only this rank's part, and trains wrongly in
    silence.
    """

    def __init__(
        self, adapter: ShardedModel, sequences: SplitSequences, place: LoopPlace, blocks: OpenBlocks, writes: Guard
    ) -> None:
        """Look at nothing yet.

        Args:
            adapter: The model.
            sequences: What splits its samples.
            place: Where the loop is.
            blocks: Those that the script has open.
            writes: Compares the parameters around a forward; here around those of the proof, whose weights differ.
        """
        self._adapter, self._sequences, self._place, self._blocks = adapter, sequences, place, blocks
        self._writes = writes
        self._proved = self._due = False
        self._next = 0
        """The number of updates before which it does not look again."""

    def before_forward(self) -> None:
        """Learn where the loop is."""
        place = self._place
        self._due = not self._proved or (place.looks_at_update and place.begins_window and place.updates >= self._next)
        if self._due:
            self._next = place.updates + min(max(place.updates, 1), _APART)

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """Prove it, where it is due."""
        if self._due:
            with nullcontext() if self._proved else perturbed_weights(self._adapter, self._place, self._blocks):
                self._writes.before_forward()
                self._sequences.prove(self._adapter.forward, *inputs, again=self._proved)
                self._writes.after_forward()
            self._writes.before_forward()
            self._proved = True
        yield
