"""Points out that BatchNorm normalizes by each rank's own micro-batch."""

from __future__ import annotations

import logging

import torch
from torch import nn

from unishard.config.topology import Topology

_logger = logging.getLogger("unishard")

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ADVICE = {
    "cuda": "to normalize over all ranks, pass torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) to prepare",
    "cpu": "torch.nn.SyncBatchNorm, which normalizes over all ranks, needs a GPU; on the CPU use GroupNorm, or a "
    "larger micro-batch",
}


def name_synchronized(model: nn.Module, topology: Topology, device: torch.device) -> None:
    """Log on rank 0 where BatchNorm trains on several ranks, once for a model."""
    if topology.world_size == 1 or topology.rank:
        return
    names = [name for name, module in model.named_modules() if isinstance(module, _KINDS) and module.training]
    if names:
        _logger.warning(
            "%s normalizes by each rank's own micro-batch in %d BatchNorm modules (%s%s); %s",
            type(model).__name__,
            len(names),
            ", ".join(names[:2]),
            ", ..." if names[2:] else "",
            _ADVICE["cpu" if device.type == "cpu" else "cuda"],
        )
