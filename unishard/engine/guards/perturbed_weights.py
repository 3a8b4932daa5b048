"""Weights of which none is zero, while something is learned of a model that must hold for all weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unishard.contract.adapter import ShardedModel
from unishard.distributed.shards import Shard
from unishard.engine.open_blocks import OpenBlocks
from unishard.engine.place import LoopPlace
from unishard.errors import BackendError
from unishard.failures.endings import is_lost_connection

_PERIOD = 1_048_573
"""Numbers that are added again and again; a prime number, so that no two rows get the same."""
_TINY, _MORE, _SOME = 1e-2, 0.1, 0.02
"""A weight that is nowhere larger than the first gets the second, any other the third, times a normal number."""


@contextmanager
def perturbed_weights(adapter: ShardedModel, place: LoopPlace, blocks: OpenBlocks) -> Iterator[None]:
    """A block in which something is added to each weight that trains. Collective.

    The same on all ranks that hold a weight. At its end all are as before, bit for bit; until then a copy of this
    rank's shards is kept, which is no larger than their gradients. Where weights are unsharded by the script, they stay
    as they are.
    """
    if blocks.unsharded:
        yield
        return
    try:
        adapter.reshard_all()
        shards = [adapter.master_shard(each) for each in adapter.module.parameters() if each.requires_grad]
    except BackendError:
        yield
        return
    kept = [shard.values.clone() for shard in shards]
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(adapter.device)
    _write(adapter, place, shards, [_perturbed(shard, numbers) for shard in shards])
    others_follow = True
    try:
        yield
    except Exception as error:  # of which other ranks may not know
        others_follow = not (isinstance(error, torch.OutOfMemoryError) or is_lost_connection(error))
        raise
    finally:
        if others_follow:
            _write(adapter, place, shards, kept)


@torch.no_grad()
def _write(adapter: ShardedModel, place: LoopPlace, shards: list[Shard], values: list[Tensor]) -> None:
    adapter.reshard_all()
    place.wrote()
    for shard, value in zip(shards, values, strict=True):
        shard.values.copy_(value)
    adapter.weights_written()


def _perturbed(shard: Shard, numbers: Tensor) -> Tensor:
    values = shard.values.detach()
    if not values.numel():
        return values
    first = shard.start % _PERIOD
    repeats = -(-(first + values.numel()) // _PERIOD)
    own = numbers.to(values.device).repeat(repeats)[first : first + values.numel()].view(values.shape)
    return values + own.to(values.dtype) * (_MORE if float(values.abs().max()) < _TINY else _SOME)
