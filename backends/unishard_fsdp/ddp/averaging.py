"""DistributedDataParallel with a communication hook that detects whether all gradients were reduced."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unishard_fsdp.private import PRIVATE_API

_logger = logging.getLogger("unishard")


class AveragingHook:
    """A communication hook that averages over all ranks, as DDP does by default, and detects the last bucket.

    DDP reduces buckets in order, each when all its gradients are ready (torch 2.13, reducer.cpp, mark_bucket_ready), so
    the last one is reduced only if no gradient is missing.
    """

    def __init__(self) -> None:
        self.finished = False
        """Whether the last backward has reduced all buckets."""

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average one `torch.distributed.GradBucket`."""
        gradients = bucket.buffer().mul_(1 / dist.get_world_size())
        self.finished = self.finished or bucket.is_last()
        work: Any = dist.all_reduce(gradients, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda reduced: reduced.value()[0])


def wrap_ddp(averaging: AveragingHook, **arguments: Any) -> DistributedDataParallel:
    """Wrap a model in DDP with the hook, and with the same buckets from the first update on. Collective."""
    buckets = PRIVATE_API["ddp-buckets"]
    if dist.get_world_size() > 2:  # the sum over two ranks does not depend on the order
        if buckets.works:
            from unishard_fsdp.private.buckets import FixedBuckets

            return _with_hook(FixedBuckets(**arguments), averaging)
        if dist.get_rank() == 0:
            _logger.warning("%s", buckets.refusal())
    return _with_hook(DistributedDataParallel(**arguments), averaging)


def _with_hook(replica: DistributedDataParallel, averaging: AveragingHook) -> DistributedDataParallel:
    replica.register_comm_hook(None, lambda _, bucket: averaging.average(bucket))
    return replica
