"""The master weights of DeepSpeed's optimizers, and their parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unishard_deepspeed.flat_master_weights import FlatShard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.kind import Kind


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

    (_lazy_init_hp_params_optimizer_state in runtime/zero/stage_1_and_2.py; stage 3 looks it up at each access)
    """
    if kind == "stages-1-2":
        optimizer._hp_optimizer_states_linked = False


def groups_of_masters(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> dict[Tensor, dict[str, Any]]:
    """The torch optimizer's group of each master weight; at stage 3 the groups hold them only during a step."""
    groups = inner.optimizer.param_groups
    if kind == "stage-3":  # runtime/zero/stage3.py
        masters = enumerate(master_tensors(optimizer, inner, kind))
        return {master: groups[optimizer.sub_group_to_group_id[index]] for index, master in masters}
    return {master: group for group in groups for master in group["params"]}
