"""Stage 3: partitions a model parameter by parameter, so that no rank needs all of it at once.

Left to itself, `deepspeed.initialize` takes a whole model on each rank, rounds it to bf16 and only then partitions it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.config import Config
from unishard.distributed.broadcast import broadcast
from unishard.distributed.dtypes import DTYPES
from unishard.engine.model.dtypes import cast_to_compute
from unishard.engine.model.materialization import materialize
from unishard_deepspeed import start
from unishard_deepspeed.patches.building import swapper_of
from unishard_deepspeed.replica_groups import Replicas

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
    with start.quiet():
        deepspeed.init_distributed(dist_init_required=False)  # takes up the group that is there, as `initialize` does
    group = None if replicas is None else replicas.get_data_parallel_group()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    low = cfg.precision.compute != "fp32"
    shared: dict[str, Any] = {}
    originals = []
    for parameters in _batches(list(model.parameters())):
        for parameter in parameters:
            materialize([parameter], device)
            broadcast([parameter])
            if 0 in parameter.stride():  # a stand-in; `contiguous` keeps its strides where it has one element, and DeepSpeed sends bytes
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            parameter.data = parameter.data.contiguous()
            if not train:
                cast_to_compute([parameter], cfg.precision)
            whole = parameter.data.view(-1)
            if low and parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[cfg.precision.compute])
            if train and parameter.requires_grad and cfg.precision.compute != cfg.precision.master:
                size = -(-whole.numel() // ranks)
                originals.append((parameter, whole[size * rank :][:size].clone()))
            del whole
        sizes = [parameter.numel() for parameter in parameters]
        with start.quiet():
            init = deepspeed.zero.Init(
                module=nn.ParameterList(parameters), config_dict_or_path=settings, data_parallel_group=group, mpu=replicas, **shared
            )
        if cfg.offload.params == "nvme":
            shared = {"param_swapper": swapper_of(init)}
        for parameter, size in zip(parameters, sizes, strict=True):
            _clear_padding(parameter, size, rank)
    buffers = list(model.buffers())
    materialize(buffers, device)
    broadcast(buffers)
    return originals


def _batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters that are whole at a time: no more elements than the largest has, since each `deepspeed.zero.Init` reads the JSON anew."""
    largest, batch, elements = max((parameter.numel() for parameter in parameters), default=0), list[nn.Parameter](), 0
    for parameter in parameters:
        if batch and elements + parameter.numel() > largest:
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += parameter.numel()
    if batch:
        yield batch


@torch.no_grad()
def _clear_padding(parameter: Any, size: int, rank: int) -> None:
    """Zero what this rank's part has beyond the end of the parameter; DeepSpeed leaves there what was in memory."""
    part = parameter.ds_tensor
    part[max(0, size - part.numel() * rank) :].zero_()
