"""Stage 3: partition a model parameter by parameter, so that no rank needs a full copy.

By default, `deepspeed.initialize` needs a full model on each rank and rounds it to bf16 before it partitions it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.kit.dtypes import cast_to_compute
from unishard.contract.kit.empty_parameters import is_empty
from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.kit.materialization import Reader, materialize, take_reader
from unishard.distributed.broadcast import broadcast, make_dense
from unishard.distributed.dtypes import DTYPES
from unishard.distributed.layout import flat
from unishard.distributed.slices import holders_of
from unishard_deepspeed import start
from unishard_deepspeed.private.building import gather_empty
from unishard_deepspeed.private.second_copy import group_of_init
from unishard_deepspeed.sharding.replicas import Replicas
from unishard_deepspeed.spec import ZeroSpec


def partition(
    deepspeed: ModuleType,
    model: nn.Module,
    spec: ZeroSpec,
    settings: dict[str, Any],
    device: torch.device,
    replicas: Replicas | None,
    *,
    train: bool,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Broadcast rank 0's buffers, and shard its parameters over the ranks in the compute dtype. Collective.

    Args:
        deepspeed: The package.
        model: Full on rank 0.
        spec: What is built.
        settings: Its JSON, which DeepSpeed may change.
        device: Where this rank computes.
        replicas: The groups that each hold a copy, if there are several.
        train: Whether to keep fp32 weights; if not, the parameters are frozen.

    Returns:
        If compute and master dtype differ: each trainable parameter with this rank's shard of its fp32 weight, to set
        the master weights, because DeepSpeed makes them from the rounded parameters.
    """
    with start.quiet():
        deepspeed.init_distributed(dist_init_required=False)  # uses the existing process group, as `initialize` does
    every = None if replicas is None else replicas.get_data_parallel_group()
    low = spec.precision.compute != "fp32"
    reads_own = _keeps_one_part(spec)
    shared: dict[str, Any] = {}
    originals = []

    def master_differs(parameter: nn.Parameter) -> bool:
        return train and parameter.requires_grad and spec.precision.compute != spec.precision.master

    for parameters in _batches(list(model.parameters())):
        group = holders_of(parameters[0]) or every
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        held: dict[Any, range] = {}
        unread: list[tuple[Any, Reader, torch.dtype, range]] = []
        for parameter in parameters:
            held[parameter] = own = flat(parameter.numel(), ranks).of(rank)
            reader = take_reader(parameter) if reads_own else None
            pending = materialize([parameter], device)
            if reader is None:
                broadcast(pending)
            make_dense([parameter])  # DeepSpeed sends its bytes; a placeholder is expanded
            if not train:
                cast_to_compute([parameter], spec.precision)
            if reader is not None:
                unread.append((parameter, reader, parameter.dtype, own))
            full = parameter.data.view(-1)
            if low and parameter.is_floating_point() and not is_kept(parameter):
                parameter.data = parameter.data.to(DTYPES[spec.precision.compute])
            if reader is None and master_differs(parameter):
                originals.append((parameter, full[own.start : own.stop].clone()))
            del full
        with start.quiet():
            init = deepspeed.zero.Init(
                module=nn.ParameterList(parameters),
                config_dict_or_path=settings,
                data_parallel_group=group,
                mpu=replicas,
                **shared,
            )
        if spec.second_copies:
            shared["zero_param_parallel_group"] = group_of_init(init)
        # Now: a buffer that is freed between two shards leaves a hole in the heap.
        for parameter, reader, dtype, own in unread:
            values = reader(own.start, own.stop).to(dtype) if own else torch.empty(0, dtype=dtype)
            parameter.ds_tensor[: values.numel()].copy_(values)
            if master_differs(parameter):
                originals.append((parameter, values.clone()))
        for parameter, own in held.items():
            parameter.ds_tensor[len(own) :].zero_()  # the padding, which DeepSpeed leaves uninitialized
    gather_empty(parameter for parameter in model.parameters() if is_empty(parameter))
    buffers = list(model.buffers())
    broadcast(materialize(buffers, device))
    return originals


def _keeps_one_part(spec: ZeroSpec) -> bool:
    """Whether a rank's part of a parameter is in its memory once, as it was, so that it can be set after DeepSpeed has
    partitioned it.
    """
    changed = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights")
    return not any(spec.zero.get(key, 0) > 1 or spec.zero.get(key) is True for key in changed)


def _batches(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group parameters of the same ranks up to the size of the largest: each `deepspeed.zero.Init` parses the JSON, so
    one call handles several.
    """
    largest, batch, elements = max((parameter.numel() for parameter in parameters), default=0), list[nn.Parameter](), 0
    for parameter in parameters:
        if batch and (elements + parameter.numel() > largest or holders_of(parameter) != holders_of(batch[0])):
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += parameter.numel()
    if batch:
        yield batch
