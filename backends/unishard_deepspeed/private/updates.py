"""Changes to how DeepSpeed's optimizers divide, check, clip and apply the gradients of a window."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard_deepspeed.kind import Kind

_ELEMENTS_AT_ONCE = 2**25
"""Elements of a host gradient to copy to the device at a time."""


def clear_stale_gradients(optimizer: Any) -> None:
    """Zero gradients that stage 3 would apply again if later steps do not use their parameter
    (runtime/zero/stage3.py).
    """
    optimizer.grad_partitions_flat_buffer.zero_()


def average_between_groups(optimizer: Any, group: Any, kind: Kind) -> None:
    """Average the gradients of a window over a process group before they are clipped and applied.

    Collective, in each window.

    Args:
        optimizer: DeepSpeed's optimizer of stage 2 or 3.
        group: The ranks that hold the same shard of different copies.
        kind: The optimizer's kind.
    """
    finalize = optimizer.finalize_gradient_accumulation_boundary  # what engine.step() calls first (runtime/engine.py)

    def finalize_averaged() -> None:
        if kind == "stage-3":
            _average_shards(optimizer, group)
            finalize()
        else:
            finalize()
            _average_flat(optimizer, group)

    optimizer.finalize_gradient_accumulation_boundary = finalize_averaged


def _average_shards(optimizer: Any, group: Any) -> None:
    """Stage 3 (runtime/zero/stage3.py)."""
    dist.all_reduce(optimizer.grad_partitions_flat_buffer, dist.ReduceOp.AVG, group)
    if optimizer.offload_optimizer:
        # Only these are copied to the host; another group may have used parameters that this one did not.
        trainable = [
            parameter for parameters in optimizer.fp16_groups for parameter in parameters if parameter.requires_grad
        ]
        optimizer._offload_boundary_param_ids.update(
            each.ds_id
            for each in trainable
            if each.partition_numel() * optimizer._get_param_partition_rank(each) < each.ds_numel
        )


def _average_flat(optimizer: Any, group: Any) -> None:
    """Stage 2 (runtime/zero/stage_1_and_2.py)."""
    if not optimizer.cpu_offload:
        for gradients in optimizer.averaged_gradients.values():
            flat = getattr(gradients, "flat_partition", None)
            if flat is not None:
                dist.all_reduce(flat, dist.ReduceOp.AVG, group)
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, dist.ReduceOp.AVG, group)
            for gradient, chunk in zip(
                gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True
            ):
                gradient.copy_(chunk.view_as(gradient))
        return
    for master, parameters in zip(
        optimizer.single_partition_of_fp32_groups, optimizer.params_in_partition, strict=True
    ):
        _average_on_host(master.grad, group, optimizer.bit16_groups_flat[0].device)
        for parameter in parameters:
            number = optimizer.get_param_id(parameter)
            _, _, start, numel = optimizer.grad_position[number]
            optimizer.norm_for_param_grads[number] = master.grad.narrow(0, int(start), int(numel)).double().norm()


def _average_on_host(gradient: Tensor, group: Any, device: torch.device) -> None:
    """Average a host gradient over a group, through a buffer on the device if there is one, because NCCL needs device
    tensors.
    """
    if device.type == "cpu":
        dist.all_reduce(gradient, dist.ReduceOp.AVG, group)
        return
    torch.cuda.synchronize(device)  # DeepSpeed copies gradients to the host without waiting
    for chunk in torch.split(gradient, _ELEMENTS_AT_ONCE):
        on_device = chunk.to(device)
        dist.all_reduce(on_device, dist.ReduceOp.AVG, group)
        chunk.copy_(on_device)


def divide_gradients(optimizer: Any, divisor: float) -> None:
    """Divide the gradients of ZeRO's next update before their norm is taken; 1 turns that off."""
    optimizer.loss_scale = divisor  # divides in the update, as in fp16; DeepSpeed does not multiply the loss


def clip_to(optimizer: Any, limit: float) -> None:
    """Set the maximum norm of ZeRO's next updates, 0 for no clipping; initially that of the config."""
    optimizer.clip_grad = limit


@contextmanager
def without_overflow_check(optimizer: Any, kind: Kind) -> Iterator[list[bool]]:
    """Let ZeRO's optimizer make updates with non-finite gradients, as plain torch does, instead of skipping them.

    All stages call `is_invalid_grad_norm` of their module (runtime/utils.py); stages 1 and 2 call `check_overflow`
    first.

    Yields:
        The results that the check would have returned; some stages replace a non-finite norm by 1 or -1.
    """
    answers: list[bool] = []

    def never_invalid(norm: Any) -> bool:
        answers.append(is_invalid(norm))
        return False

    module, checks = sys.modules[type(optimizer).__module__], kind == "stages-1-2"
    is_invalid = module.is_invalid_grad_norm
    module.is_invalid_grad_norm = never_invalid  # type: ignore[attr-defined]
    if checks:
        optimizer.check_overflow = lambda partition_gradients=True: None
    try:
        yield answers
    finally:
        module.is_invalid_grad_norm = is_invalid  # type: ignore[attr-defined]
        if checks:
            del optimizer.check_overflow
