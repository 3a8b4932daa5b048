"""How DeepSpeed is left with nothing gathered, and told of masters and optimizer state that were written in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.patches.master_weights import link_states_again, master_tensors
from unishard_deepspeed.patches.optimizer_kind import Kind

__all__ = ["copy_masters", "find_states", "forget_states", "groups_of_masters", "keep_parts_alone"]


def groups_of_masters(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> dict[Tensor, dict[str, Any]]:
    """The group of the torch optimizer that each master belongs to; stage 3 keeps them out of it but for the step."""
    groups = inner.optimizer.param_groups
    if kind == "stage-3":  # runtime/zero/stage3.py
        masters = enumerate(master_tensors(optimizer, inner, kind))
        return {master: groups[optimizer.sub_group_to_group_id[index]] for index, master in masters}
    return {master: group for group in groups for master in group["params"]}


def keep_parts_alone(optimizer: Any, kind: Kind) -> None:
    """Stage 3: drop all that is gathered, also what stays so from forward to forward; the next forward gathers it. Collective."""
    if kind == "stage-3":  # runtime/zero/stage3.py
        optimizer._partition_all_parameters()


def copy_masters(optimizer: Any, inner: InnerOptimizer, kind: Kind) -> None:
    """Make what the model computes with from the masters, as after an update. Collective."""
    if kind == "stage-3":  # runtime/zero/stage3.py
        optimizer._partition_all_parameters()
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
    elif kind == "stage-0":
        for parameter, master in inner.whole.items():
            if parameter is not master:
                parameter.data.copy_(master)
    else:
        optimizer.update_lp_params()  # runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py


def forget_states(inner: InnerOptimizer, kind: Kind) -> None:
    """Let go of the views by which DeepSpeed finds the optimizer's state, so that its memory is free (utils/tensor_fragment.py)."""
    for parameter in inner.trained if kind in ("stages-1-2", "bf16-stage-1") else ():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            mapping.optim_fragment = None


def find_states(optimizer: Any, kind: Kind) -> None:
    """Let DeepSpeed look for the optimizer's state now, and again after the next update, which may make more of it."""
    if kind in ("stages-1-2", "bf16-stage-1"):  # runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py
        link_states_again(optimizer, kind)
        optimizer._lazy_init_hp_params_optimizer_state()
        link_states_again(optimizer, kind)
