"""Reshard DeepSpeed's parameters, and update it after master weights and optimizer state were written in place."""

from __future__ import annotations

from typing import Any

import torch

from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.kind import Kind
from unishard_deepspeed.private import PRIVATE_API
from unishard_deepspeed.private.master_weights import relink_after_update


def reshard_all(optimizer: Any, kind: Kind) -> None:
    """Stage 3: reshard all parameters, also those kept between forwards; the next forward gathers them. Collective."""
    if kind == "stage-3":  # runtime/zero/stage3.py
        optimizer._partition_all_parameters()


def copy_masters(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> None:
    """Update the copies that the model computes with from the master weights, as after an update. Collective."""
    if kind == "stage-3":  # runtime/zero/stage3.py
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        gather_after(optimizer, kind)
    elif kind == "stage-0":
        for parameter, master in inner.full_masters.items():
            if parameter is not master:
                parameter.data.copy_(master)
    else:
        optimizer.update_lp_params()  # runtime/zero/stage_1_and_2.py


def gather_after(optimizer: Any, kind: Kind) -> None:
    """Stage 3: let the next gathers wait on the device for the shards that were written just now.

    DeepSpeed gathers on a stream that waits for nothing (runtime/zero/partitioned_param_coordinator.py), so a loop that
    reads nothing between a write, such as an update, and the next forward may gather shards before they are written.

    Args:
        optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
        kind: The optimizer's kind.
    """
    if kind != "stage-3" or not torch.cuda.is_available():
        return
    if PRIVATE_API["gathers-stage-3"].works:
        offload = getattr(optimizer, "parameter_offload", optimizer)
        offload._DeepSpeedZeRoOffload__allgather_stream.wait_stream(torch.cuda.current_stream())
    else:
        torch.cuda.current_stream().synchronize()


def unlink_states(inner: InnerOptimizer, kind: Kind) -> None:
    """Remove DeepSpeed's views of the optimizer state, so that its memory is freed (utils/tensor_fragment.py)."""
    for parameter in inner.trained if kind == "stages-1-2" else ():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            mapping.optim_fragment = None


def relink_states(optimizer: Any, kind: Kind) -> None:
    """Let DeepSpeed link the optimizer state now, and again after the next update, which may create more."""
    if kind == "stages-1-2":  # runtime/zero/stage_1_and_2.py
        relink_after_update(optimizer, kind)
        optimizer._lazy_init_hp_params_optimizer_state()
        relink_after_update(optimizer, kind)
