"""Runs of consecutive positions as samples: of which each rank computes its own, and sends something to all."""

from __future__ import annotations

import torch
from torch import Tensor

from unishard.sequence.context import SplitBatch
from unishard.sequence.exchange import gather_positions


def as_runs(tensor: Tensor, split: SplitBatch) -> Tensor:
    """Of `[batch, positions, ...]` each run as a sample, `[batch x runs, positions, ...]`."""
    return torch.unflatten(tensor, 1, (split.layout.runs_of_a_rank, -1)).flatten(0, 1)


def joined_runs(tensor: Tensor, split: SplitBatch) -> Tensor:
    """The opposite of `as_runs`."""
    return torch.unflatten(tensor, 0, (-1, split.layout.runs_of_a_rank)).flatten(1, 2)


def gather_runs(tensor: Tensor, split: SplitBatch) -> Tensor:
    """Of `[batch x runs, ...]` that of every rank, `[batch, all runs, ...]`, in order. Collective in the group."""
    sent = torch.unflatten(tensor.flatten(1), 0, (-1, 1, split.layout.runs_of_a_rank))
    everyones = split.layout.join(gather_positions(sent, split.group), 2).squeeze(1)
    return torch.unflatten(everyones, 2, tensor.shape[1:])
