"""Reshard DeepSpeed's parameters, and update it after master weights and optimizer state were written in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unishard_deepspeed.flat_master_weights import FlatShard, InnerOptimizer
from unishard_deepspeed.private import PRIVATE_API
from unishard_deepspeed.private.optimizer_kind import Kind

# -- The master weights of DeepSpeed's optimizers, and their parameters ----------------------------


def master_tensors(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> list[Tensor]:
    """The live master weights on this rank: flat partitions, or full tensors at stage 0."""
    return list(optimizer.fp32_partitioned_groups_flat) if kind == "stage-3" else inner.masters


def shards_of_masters(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> dict[Tensor, list[FlatShard]]:
    """The shards of parameters in each master weight on this rank."""
    if kind == "stage-0":
        return {
            master: [FlatShard(parameter, 0, parameter.numel())] for parameter, master in inner.full_masters.items()
        }
    shards: dict[Tensor, list[FlatShard]] = {}
    masters = master_tensors(optimizer, inner, kind)
    for parameter in inner.trained:
        if kind == "stage-3":
            group, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]  # runtime/zero/stage3.py
        else:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # utils/tensor_fragment.py
            if mapping is None:
                continue  # other ranks hold all of it
            group, start, numel = (
                mapping.param_group_index,
                mapping.hp_fragment_address.start,
                mapping.hp_fragment_address.numel,
            )
        if numel:
            shards.setdefault(masters[group], []).append(FlatShard(parameter, start, numel))
    return shards


def relink_after_update(optimizer: Any, kind: Kind) -> None:
    """Let DeepSpeed link the optimizer state again after the next update; by default it does so only after the first.

    (_lazy_init_hp_params_optimizer_state in runtime/zero/stage_1_and_2.py and bf16_optimizer.py; stage 3 looks it up at
    each access)
    """
    if kind in ("stages-1-2", "bf16-stage-1"):
        optimizer._hp_optimizer_states_linked = False


def groups_of_masters(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> dict[Tensor, dict[str, Any]]:
    """The torch optimizer's group of each master weight; at stage 3 the groups hold them only during a step."""
    groups = inner.optimizer.param_groups
    if kind == "stage-3":  # runtime/zero/stage3.py
        masters = enumerate(master_tensors(optimizer, inner, kind))
        return {master: groups[optimizer.sub_group_to_group_id[index]] for index, master in masters}
    return {master: group for group in groups for master in group["params"]}


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
        optimizer.update_lp_params()  # runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py


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
    for parameter in inner.trained if kind in ("stages-1-2", "bf16-stage-1") else ():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            mapping.optim_fragment = None


def relink_states(optimizer: Any, kind: Kind) -> None:
    """Let DeepSpeed link the optimizer state now, and again after the next update, which may create more."""
    if kind in ("stages-1-2", "bf16-stage-1"):  # runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py
        relink_after_update(optimizer, kind)
        optimizer._lazy_init_hp_params_optimizer_state()
        relink_after_update(optimizer, kind)
