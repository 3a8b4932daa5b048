"""Stage 3: partitions a model parameter by parameter, so that no rank needs all of it at once.

Left to itself, `deepspeed.initialize` takes a whole model on each rank, rounds it to bf16 and only then partitions it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from unishard.config import Config
from unishard.engine.formats import DTYPES
from unishard.engine.materialization import materialize
from unishard.engine.replica import broadcast
from unishard.engine.untrained import to_compute_format
from unishard_deepspeed import internals, start
from unishard_deepspeed.replicas import Replicas

__all__ = ["partition"]


def partition(
    deepspeed: ModuleType,
    model: nn.Module,
    cfg: Config,
    settings: dict[str, Any],
    device: torch.device,
    replicas: Replicas | None,
    *,
    train: bool,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Bring rank 0's buffers whole and its parameters in parts onto every rank, in the compute format. Collective.

    Args:
        deepspeed: The package.
        model: Whole on rank 0.
        cfg: What to run.
        settings: The JSON for `deepspeed.initialize`.
        device: Where this rank computes.
        replicas: The groups that hold a copy each, where there are several.
        train: Whether the fp32 weights are needed; else the parameters are frozen.

    Returns:
        Where the compute format is not that of the masters: each trainable parameter, and this rank's part of its master weight,
        from which the masters must be set, since DeepSpeed makes them from what was rounded.
    """
    with start.hushed():
        deepspeed.init_distributed(dist_init_required=False)  # takes up the group that is there, as `initialize` does
        group = None if replicas is None else replicas.get_data_parallel_group()
        init = deepspeed.zero.Init(config_dict_or_path=settings, data_parallel_group=group, mpu=replicas)
    low = cfg.precision.compute != "fp32"
    parts = []
    for parameter in list(model.parameters()):
        materialize([parameter], device)
        broadcast([parameter])
        parameter.data = parameter.data.contiguous()
        if not train:
            to_compute_format([parameter], cfg)
        whole = parameter.data.view(-1)
        if low and parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[cfg.precision.compute])
        internals.partition(init, parameter)
        if train and parameter.requires_grad and cfg.precision.compute != cfg.precision.master:
            size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            rank: int = parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
            parts.append((parameter, whole[size * rank :][:size].clone()))
    buffers = list(model.buffers())
    materialize(buffers, device)
    broadcast(buffers)
    return parts
