"""Find the mean loss of a part of a sequence."""

from __future__ import annotations

from torch import Tensor

from unishard.engine.guards.graph import comes_from
from unishard.engine.guards.guard import ComparedCall, Guard
from unishard.errors import ContractError
from unishard.sequence.split_sequences import SplitSequences


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
