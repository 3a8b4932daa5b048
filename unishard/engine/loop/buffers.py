"""Buffers that each rank changes by its own data, such as BatchNorm's running statistics: made equal where they are
read.

Neither FSDP2 nor DeepSpeed does anything about them after the start; DistributedDataParallel by default sends rank 0's
before each forward (`forward_sync_buffers`), which unishard switches off. So the same is done here around every engine.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.export.sources import persistent_buffers
from unishard.checkpoint.hashing import hash_of
from unishard.contract.adapter import InferenceAdapter
from unishard.distributed.broadcast import average, broadcast
from unishard.distributed.shards import flat
from unishard.engine.loop.call_order import CallOrder


class Buffers:
    """The persistent buffers of a model: those that a checkpoint has.

    The others are caches, which each rank fills for itself.
    """

    def __init__(self, how: str, adapter: InferenceAdapter, order: CallOrder) -> None:
        self._how = how
        self._adapter = adapter
        self._order = order
        self.stale = False
        """Whether a forward in training mode may have changed them since they were equal."""

    def equalize(self, call: str) -> None:
        """Make the buffers that differ between ranks equal on all of them, as `training.buffers` says. Collective.

        Costs one small all-reduce of hashes, and nothing for a model without persistent buffers.

        Args:
            call: The engine's method that does it.

        Raises:
            RankMismatchError: Another rank made another call.
        """
        self.stale = False
        if self._how == "local" or dist.get_world_size() == 1:
            return
        held = list({id(buffer): buffer for buffer in persistent_buffers(self._adapter.module).values()}.values())
        if not held:
            return
        self._order.check_now(call, ", buffers")
        # `data`: BatchNorm's backward does not read the running statistics, but autograd counts writes to them.
        with self._order.awaiting():
            different = [buffer.data for buffer in _different(held, self._adapter.device)]
            means = [buffer for buffer in different if self._how == "sync" and buffer.is_floating_point()]
            average(means)
            sent = [
                (buffer, flat(buffer).view(buffer.shape))
                for buffer in different
                if self._how == "rank0" or not buffer.is_floating_point()
            ]
            broadcast(values for _, values in sent)
            for buffer, values in sent:
                buffer.copy_(values)

    def equalize_for_evaluation(self, call: str) -> None:
        """The same before a forward in evaluation mode, if there was one in training mode. Collective."""
        if self.stale and not self._adapter.module.training:
            self.equalize(call)


def _different(buffers: list[Tensor], device: torch.device) -> list[Tensor]:
    """Those of which the ranks hold different bits, the same on every rank. Collective."""
    hashes = [hash_of(buffer) for buffer in buffers]
    mine = torch.tensor([value - 2**64 if value >> 63 else value for value in hashes], dtype=torch.int64, device=device)
    largest = torch.stack((mine, ~mine))  # the largest complement is that of the smallest
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    high, low = largest.tolist()
    return [buffer for buffer, most, least in zip(buffers, high, low, strict=True) if most != ~least]
