"""How DeepSpeed 0.19.8 is left with nothing gathered, and told of masters and optimizer state that were written in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unishard_deepspeed.internals.masters import link_states_again, master_tensors, replicated_masters, torch_optimizer, trained

__all__ = ["copy_masters", "find_states", "forget_states", "groups_of_masters", "keep_parts_alone"]


def groups_of_masters(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    """The group of the torch optimizer that each master belongs to; stage 3 keeps them out of it but for the step."""
    groups = torch_optimizer(optimizer).param_groups
    if hasattr(optimizer, "sub_group_to_group_id"):  # runtime/zero/stage3.py
        masters = enumerate(master_tensors(optimizer))
        return {master: groups[optimizer.sub_group_to_group_id[index]] for index, master in masters}
    return {master: group for group in groups for master in group["params"]}


def keep_parts_alone(optimizer: Any) -> None:
    """Stage 3: drop all that is gathered, also what stays so from forward to forward; the next forward gathers it. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # runtime/zero/stage3.py
        optimizer._partition_all_parameters()


def copy_masters(optimizer: Any) -> None:
    """Make what the model computes with from the masters, as after an update. Collective."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # runtime/zero/stage3.py
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
    elif hasattr(optimizer, "update_lp_params"):  # runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py
        optimizer.update_lp_params()
    for parameter, master in replicated_masters(optimizer).items():
        parameter.data.copy_(master)


def forget_states(optimizer: Any) -> None:
    """Let go of the views by which DeepSpeed finds the optimizer's state, so that its memory is free (utils/tensor_fragment.py)."""
    for parameter in trained(optimizer):
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            mapping.optim_fragment = None


def find_states(optimizer: Any) -> None:
    """Let DeepSpeed look for the optimizer's state now, and again after the next update, which may make more of it."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py
        link_states_again(optimizer)
        optimizer._lazy_init_hp_params_optimizer_state()
    link_states_again(optimizer)
