"""Stage 3: partitions a model parameter by parameter, so that no rank needs all of it at once.

Left to itself, `deepspeed.initialize` takes a whole model on each rank, rounds it to bf16 and only then partitions it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.config import Config
from unishard.engine.materialization import materialize
from unishard.engine.replica import broadcast
from unishard.engine.untrained import compute_dtype, to_compute_format
from unishard_deepspeed import internals, start

__all__ = ["partition"]


def partition(
    deepspeed: ModuleType, model: nn.Module, cfg: Config, settings: dict[str, Any], device: torch.device, *, train: bool
) -> list[tuple[nn.Parameter, Tensor]]:
    """Bring rank 0's buffers whole and its parameters in parts onto every rank, in the compute format. Collective.

    Args:
        deepspeed: The package.
        model: Whole on rank 0.
        cfg: What to run.
        settings: The JSON for `deepspeed.initialize`.
        device: Where this rank computes.
        train: Whether the fp32 weights are needed; else the parameters are frozen.

    Returns:
        Where the compute format is not fp32: each trainable parameter, and this rank's part of its fp32 weight, from which the
        masters must be set, since DeepSpeed makes them from what was rounded.
    """
    with start.hushed():
        deepspeed.init_distributed(dist_init_required=False)  # takes up the group that is there, as `initialize` does
        init = deepspeed.zero.Init(config_dict_or_path=settings)
    dtype = compute_dtype(cfg)
    parts = []
    for parameter in list(model.parameters()):
        materialize([parameter], device)
        broadcast([parameter])
        parameter.data = parameter.data.contiguous()
        if not train:
            to_compute_format([parameter], cfg)
        whole = parameter.data.view(-1)
        if dtype != torch.float32 and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        internals.partition(init, parameter)
        if train and parameter.requires_grad and dtype != torch.float32:
            size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
            parts.append((parameter, whole[size * dist.get_rank() :][:size].clone()))
    buffers = list(model.buffers())
    materialize(buffers, device)
    broadcast(buffers)
    return parts
