"""DistributedDataParallel by its documented interface: it averages through a hook that says whether everything was averaged."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unishard_fsdp.patches import PATCHES

__all__ = ["Averaging", "replicated"]

_logger = logging.getLogger("unishard")


class Averaging:
    """A communication hook that averages over all ranks, as DDP does without a hook, and notices the last bucket.

    DDP reduces its buckets in their order, each when all its gradients are there (torch 2.13, reducer.cpp, mark_bucket_ready), so the last
    one comes only where no gradient is missing.
    """

    def __init__(self) -> None:
        self.finished = False
        """Whether the last backward has reduced everything."""

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average one `torch.distributed.GradBucket`."""
        gradients = bucket.buffer().mul_(1 / dist.get_world_size())
        self.finished = self.finished or bucket.is_last()
        work: Any = dist.all_reduce(gradients, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda reduced: reduced.value()[0])


def replicated(averaging: Averaging, **arguments: Any) -> DistributedDataParallel:
    """DDP that averages through a hook, in the same buckets from the first update on. Collective."""
    buckets = PATCHES["ddp-buckets"]
    if dist.get_world_size() > 2:  # of two ranks' gradients the sum is the same in either order
        if buckets.works:
            from unishard_fsdp.patches.buckets import FixedBuckets

            return _hooked(FixedBuckets(**arguments), averaging)
        if dist.get_rank() == 0:
            _logger.warning("%s", buckets.refusal())
    return _hooked(DistributedDataParallel(**arguments), averaging)


def _hooked(replica: DistributedDataParallel, averaging: Averaging) -> DistributedDataParallel:
    replica.register_comm_hook(None, lambda _, bucket: averaging.average(bucket))
    return replica
