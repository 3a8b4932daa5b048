"""Access to gradients and master weights in DeepSpeed's engines, and how a window is discarded.

| engine | reduced gradients | master weights |
|---------------------------------|-------------------------------------------------|------------------------------------|
| stage 0, torch optimizer | full, `.grad` | the parameters |
| stage 0, FP16_UnfusedOptimizer | full, `.grad`, by default in fp32 | full, `fp32_groups` |
| stages 1 and 2 | flat partitions, `averaged_gradients` | flat partitions |
| the same, offloaded | flat partitions, `.grad` of the master weights | flat partitions, in host memory |
| stage 3 | a shard of each parameter, padded at the end | a shard of each parameter, padded |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.kind import Kind


def gradient_shards(engine: Any, inner: InnerOptimizer, kind: Kind) -> dict[nn.Parameter, Shard]:
    """This rank's shard of each reduced gradient. An unused trainable parameter has zeros."""
    optimizer = engine.optimizer
    if kind == "stage-3":  # runtime/zero/stage3.py
        return {
            parameter: _stage_3_shard(parameter, _stage_3_gradient(optimizer, parameter)) for parameter in inner.trained
        }
    if kind == "stages-1-2":  # runtime/zero/stage_1_and_2.py
        return _partitioned_gradients(optimizer, inner)
    parts = {}
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # frozen in `prepare`; the others have one
            parts[parameter] = Shard(parameter.shape, parameter.grad)
    return parts


def _stage_3_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    values: Tensor = optimizer._get_fp32_grad_state_partition(parameter, release_swap_buffers=False)[0]
    return values


def _stage_3_shard(parameter: Any, padded: Tensor) -> Shard:
    start = min(
        padded.numel() * parameter.ds_zero_partition_rank, parameter.ds_numel
    )  # runtime/zero/partition_parameters.py
    values = padded.detach().view(-1)[: parameter.ds_numel - start]
    return Shard(parameter.ds_shape, values, start, parameter.ds_process_group)


def _partitioned_gradients(optimizer: Any, inner: InnerOptimizer) -> dict[nn.Parameter, Shard]:
    ranks = optimizer.dp_process_group
    parts = {parameter: _empty_shard(parameter, ranks) for parameter in inner.trained}
    for index, group in enumerate(optimizer.params_in_partition):
        if optimizer.cpu_offload:
            intervals = [_offloaded_gradient(optimizer, parameter) for parameter in group]
        else:
            # As in get_grad_norm_direct: padding between parameters is marked; padding at the end has no parameter.
            intervals = [
                values for values in optimizer.averaged_gradients[index] if not getattr(values, "_zero_padding", False)
            ]
        for parameter, values in zip(group, intervals, strict=False):
            parts[parameter] = Shard(parameter.shape, values.detach().view(-1), _start_of(parameter), ranks)
    return parts


def _offloaded_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    group, _, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    values: Tensor = optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, numel)
    return values


def _start_of(parameter: Any) -> int:
    start: int = parameter._hp_mapping.lp_fragment_address.start  # utils/tensor_fragment.py
    return start


def _empty_shard(parameter: nn.Parameter, ranks: Any, dtype: torch.dtype = torch.float32) -> Shard:
    return Shard(parameter.shape, torch.empty(0, dtype=dtype, device=parameter.device), 0, ranks)


def measure_offloaded(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> None:
    """Recompute norms and overflow of offloaded gradients, which DeepSpeed computes before the user can edit them."""
    if kind == "stage-3":  # runtime/zero/stage3.py
        for parameter in inner.trained:
            values = _stage_3_gradient(optimizer, parameter)
            optimizer.norm_for_param_grads[optimizer.get_param_id(parameter)] = optimizer._constant_buffered_norm2(
                values
            )
    elif kind == "stages-1-2":  # runtime/zero/stage_1_and_2.py
        optimizer.local_overflow = False
        for group in optimizer.params_in_partition:
            for parameter in group:
                values = _offloaded_gradient(optimizer, parameter)
                optimizer.norm_for_param_grads[optimizer.get_param_id(parameter)] = values.double().norm(2)
                optimizer.update_offload_overflow_tracker(values)


def master_shard_of(optimizer: Any, inner: InnerOptimizer | None, parameter: Any, kind: Kind) -> Shard:
    """This rank's shard of a master weight, or of the parameter if it was frozen in `prepare` or for inference."""
    if kind == "stage-3":
        if inner is None or optimizer.get_param_id(parameter) not in optimizer.grad_position:
            return _stage_3_shard(parameter, parameter.ds_tensor)
        return _stage_3_shard(
            parameter, optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)[0]
        )
    if inner is not None and kind == "stage-0":
        return Shard(parameter.shape, inner.full_masters.get(parameter, parameter.detach()))
    if inner is not None and hasattr(parameter, "_hp_mapping"):
        if parameter._hp_mapping is None:  # all of it belongs to other ranks
            return _empty_shard(parameter, optimizer.dp_process_group, inner.masters[0].dtype)
        return Shard(
            parameter.shape,
            parameter._hp_mapping.hp_fragment.detach(),
            _start_of(parameter),
            optimizer.dp_process_group,
        )
    return Shard(parameter.shape, parameter.detach())


def update_low_precision_copy(parameter: Any, value: Tensor, kind: Kind) -> None:
    """Update the copy that the model computes with to an edited master weight; every rank has the full value."""
    if kind != "stage-3":
        parameter.data.copy_(value)
        return
    part = _stage_3_shard(parameter, parameter.ds_tensor.data)
    part.values.copy_(value.reshape(-1)[part.start : part.start + part.values.numel()])
    if parameter.data.shape == parameter.ds_shape:  # gathered now
        parameter.data.copy_(value)
