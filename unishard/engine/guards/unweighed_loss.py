"""Find the mean loss of a part of a sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.engine.guards.graph import comes_from
from unishard.engine.guards.guard import Guard
from unishard.errors import ContractError
from unishard.failures.compared_call import ComparedCall
from unishard.sequence.split_sequences import SplitSequences


class UnweighedLoss(Guard):
    """Refuses the mean loss of a part: parts have different numbers of labels, so the mean of means is another loss.

    So is one of whose items some are padding, and one with a loss that a module has kept of its part and that does not
    add up. Without it: a loss that the script computes from logits trains wrongly in silence.
    """

    def __init__(self, sequences: SplitSequences) -> None:
        self._sequences = sequences
        self._counted = False
        """Whether it was asked what items are counted."""

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Raise ContractError unless the loss is that of the group's micro-batch."""
        for kept in self._sequences.kept_losses:
            value = kept.value()
            if value is not None and value.requires_grad and comes_from(loss, value):
                raise ContractError(
                    f"with parallel.sequence {kept.title} is computed of a part of the samples, and is no sum or mean "
                    "over tokens, so this loss with it would train wrongly in silence; leave it out, or "
                    "remove parallel.sequence"
                )
        self._require_no_padding(call.num_items)
        if call.num_items is not None or call.scaled:
            return
        own = self._sequences.forward.loss
        if own is None or not comes_from(loss, own):
            raise ContractError(
                "with parallel.sequence this loss is the mean of a part of the samples, which weighs their tokens "
                "unequally; pass the sum and how many items it sums over: engine.backward(loss_sum, num_items=number)"
            )

    def _require_no_padding(self, items: int | Tensor | None) -> None:
        """Once, for it waits for the other ranks of the group: one that has no padding may count all positions."""
        split = self._sequences.forward.last
        if self._counted or split is None or not isinstance(items, int) or split.unpadded == split.length:
            return
        self._counted = True
        runs = split.layout.runs(split.group.rank, split.length)
        has_padding = any(run.start + run.length > split.unpadded for run in runs)
        wrong = torch.tensor(has_padding and items == len(split.documents) * split.part).int()
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX, group=split.group.hosts)
        if wrong:
            raise ContractError(
                f"num_items is {items}, all positions of a part, of which some are padding of parallel.sequence (of "
                f"{split.unpadded} to {split.length} positions); count those with labels: (labels != -100).sum()"
            )
