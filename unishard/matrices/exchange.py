"""One bucket of matrices between the ranks that share them: two all-to-alls, of gradients and of updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.matrices.owners import Matrix


class Exchange:
    """Sends shards of some matrices to their owners, and shards of what these make of them back.

    Each rank sends an element at most once each way, as it does in an all-gather, but no rank holds more than its own
    shards and the matrices that it owns.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        """Of matrices that one process group shares, the same on all its ranks."""
        self._group = matrices[0].group
        self._rank, ranks = dist.get_rank(self._group), range(dist.get_world_size(self._group))
        self._matrices = sorted(matrices, key=lambda each: each.owner)
        self.owned = [each for each in self._matrices if each.owner == self._rank]
        """Those that this rank owns, in the order in which `to_owners` returns them."""
        self._sent = [sum(each.held for each in self._matrices if each.owner == rank) for rank in ranks]
        self._received = [sum(len(each.intervals[rank]) for each in self.owned) for rank in ranks]

    def to_owners(self, shards: Sequence[Tensor], matrices: Sequence[Matrix]) -> list[Tensor]:
        """The whole matrices of `owned`. Collective.

        Args:
            shards: This rank's interval of each matrix, flat, of one dtype and on the device; empty where it has none.
            matrices: Those matrices, in the order of `shards`.
        """
        by_name = {matrix.name: shard for matrix, shard in zip(matrices, shards, strict=True)}
        sent = torch.cat([by_name[each.name] for each in self._matrices])
        parts = torch.split(self._exchanged(sent, self._received, self._sent), self._received)
        wholes, begun = [], [0] * len(parts)
        for matrix in self.owned:
            whole = sent.new_empty(matrix.shape.numel())
            for rank, held in enumerate(matrix.intervals):
                whole[held.start : held.stop] = parts[rank][begun[rank] : begun[rank] + len(held)]
                begun[rank] += len(held)
            wholes.append(matrix.order.full(whole, matrix.shape))
        return wholes

    def from_owners(self, wholes: Sequence[Tensor], like: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
        """This rank's interval of what the owners made of each matrix, flat. Collective.

        Args:
            wholes: Of `owned`.
            like: Any tensor on the device, of the dtype of `wholes`.
            matrices: Those matrices, in the order of the result.
        """
        rows = [matrix.order.counted(whole) for whole, matrix in zip(wholes, self.owned, strict=True)]
        pieces = [
            row[matrix.intervals[rank].start : matrix.intervals[rank].stop]
            for rank in range(len(self._received))
            for row, matrix in zip(rows, self.owned, strict=True)
        ]
        sent = torch.cat(pieces) if pieces else like.new_empty(0)
        received = self._exchanged(sent, self._sent, self._received)
        parts = torch.split(received, [each.held for each in self._matrices])
        by_name = {each.name: part for each, part in zip(self._matrices, parts, strict=True)}
        return [by_name[each.name] for each in matrices]

    def _exchanged(self, sent: Tensor, received: list[int], sizes: list[int]) -> Tensor:
        got = sent.new_empty(sum(received))
        dist.all_to_all_single(got, sent, received, sizes, group=self._group)
        return got
