"""Functions that see only a few positions before each, such as causal convolutions and shifts.

Each run of positions gets the ones before it, its halo, by one all-gather of the last ones of every run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from unishard.errors import ModelError
from unishard.sequence import context
from unishard.sequence.context import SplitBatch
from unishard.sequence.documents import numbers_of
from unishard.sequence.runs import as_runs, gather_runs


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A causal convolution of each channel, for your own model, also where `parallel.sequence` gives each rank a part.

    Without an engine that splits sequences it is a plain convolution; with one, packed documents are apart. Collective
    in the ranks that share a sample.

    Args:
        x: `[batch, channels, positions]`, of this rank's positions.
        weight: `[channels, width]`, the last column for the position itself.
        bias: `[channels]`.

    Returns:
        `[batch, channels, positions]`.
    """
    reach = weight.shape[-1] - 1

    def convolved(seen: Tensor) -> Tensor:
        return functional.conv1d(functional.pad(seen, (reach, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0])

    return over_halo(convolved, x, reach)


def shift(x: Tensor, count: int = 1) -> Tensor:
    """`x` of `count` positions before, as the token shift of RWKV; zeros at the beginning of a sequence.

    For your own model, also where `parallel.sequence` gives each rank a part; packed documents are then apart.
    Collective in the ranks that share a sample.

    Args:
        x: `[batch, positions, ...]`, of this rank's positions.
        count: How many.

    Returns:
        As `x`.
    """
    if context.current is not None and context.current.proving:
        return x

    def shifted(seen: Tensor) -> Tensor:
        return functional.pad(seen, (count, 0))[..., : seen.shape[-1]]

    return over_halo(shifted, x.flatten(2).transpose(1, 2), count).transpose(1, 2).reshape(x.shape)


def over_halo(function: Callable[[Tensor], Tensor], x: Tensor, reach: int, *, apart: bool = True) -> Tensor:
    """What a function makes of whole sequences, at this rank's positions. Collective in the group.

    Args:
        function: Of `[batch, channels, positions]`, of which it takes zeros before the first; causal.
        x: Of this rank's positions; all of them where no engine splits sequences.
        reach: How many positions before its own the function sees.
        apart: Whether it sees none of another document.

    Raises:
        ModelError: `x` has other positions.
    """
    if context.current is None or not reach:
        return function(x)
    made: Tensor = _outside_graphs(function, x, reach, context.current, apart)
    return made


def _with_halo(function: Callable[[Tensor], Tensor], x: Tensor, reach: int, split: SplitBatch, apart: bool) -> Tensor:
    batch, _, length = x.shape
    if split.proving:  # each position is a sample
        made = function(x.transpose(1, 2).reshape(batch * length, -1, 1))
        return torch.unflatten(made.squeeze(2), 0, (batch, length)).transpose(1, 2)
    if length != split.part:
        raise ModelError(
            f"a convolution or shift of {length} positions, where parallel.sequence gives each rank {split.part}; "
            "set use_cache to False, for which models pad short samples, or remove parallel.sequence"
        )
    own = as_runs(x.transpose(1, 2), split)
    seen = torch.cat([_halo(own, reach, split), own], 1)
    if apart and any(len(each) > 1 for each in split.separate_documents):
        made = _with_gaps(function, seen, reach, split)
    else:
        made = function(seen.transpose(1, 2))[..., reach:]
    return torch.unflatten(made, 0, (batch, -1)).transpose(1, 2).flatten(2, 3)


# Not compiled, as attention is not.
_outside_graphs = torch.compiler.disable(_with_halo)  # type: ignore[no-untyped-call]


def _halo(own: Tensor, reach: int, split: SplitBatch) -> Tensor:
    """The positions before each run, `[batch x runs, reach, channels]`; zeros before the sequence."""
    kept = min(reach, own.shape[1])  # of parts shorter than the halo
    everyones = gather_runs(own[:, own.shape[1] - kept :], split).flatten(1, 2)
    everyones = functional.pad(everyones, (0, 0, reach, 0))
    starts = [number * kept for number in split.layout.numbers(split.group.rank)]
    return torch.stack([everyones[:, start : start + reach] for start in starts], 1).flatten(0, 1)


def _with_gaps(function: Callable[[Tensor], Tensor], seen: Tensor, reach: int, split: SplitBatch) -> Tensor:
    """With as many zeros between documents as a function sees."""
    places = _spread(split, reach)
    spread = seen.new_zeros(len(seen), int(places.max()) + 1, seen.shape[2])
    places = places.to(seen.device, non_blocking=True)
    spread = spread.scatter(1, places[:, :, None].expand(-1, -1, seen.shape[2]), seen)
    made = function(spread.transpose(1, 2))
    return made.gather(2, places[:, None, reach:].expand(-1, made.shape[1], -1))


def _spread(split: SplitBatch, reach: int) -> Tensor:
    """Where each position of a run with its halo is, if documents are `reach` positions apart: `[samples, seen]`."""
    numbers = numbers_of(split.separate_documents)
    numbers = torch.cat([numbers[:, :1].expand(-1, reach), numbers], 1)
    runs = split.layout.runs(split.group.rank, split.length)
    seen = torch.stack([numbers[:, run.start : run.start + reach + run.length] for run in runs], 1).flatten(0, 1)
    return torch.arange(seen.shape[1]) + reach * (seen - seen[:, :1])
