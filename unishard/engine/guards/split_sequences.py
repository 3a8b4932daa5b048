"""Find what would go wrong in silence where each rank has a part of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from unishard.contract.adapter import EngineAdapter
from unishard.engine.guards.graph import comes_from
from unishard.engine.guards.guard import ComparedCall, Guard
from unishard.errors import ContractError
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


class UnweighedLoss(Guard):
    """Refuses the mean loss of a part: parts have different numbers of labels, so the mean of means is another loss.

    Without it: a loss that the script computes from logits trains wrongly in silence.
    """

    def __init__(self, sequences: SplitSequences) -> None:
        self._sequences = sequences

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Raise ContractError unless the loss is that of the group's micro-batch."""
        if call.num_items is not None or call.scaled:
            return
        own = self._sequences.forward.loss
        if own is None or not comes_from(loss, own):
            raise ContractError(
                "with parallel.sequence this loss is the mean of a part of the samples, which weighs their tokens "
                "unequally; pass the sum and how many items it sums over: engine.backward(loss_sum, num_items=number)"
            )
