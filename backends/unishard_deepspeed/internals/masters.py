"""The masters of DeepSpeed 0.19.8's optimizers, and which parameters they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from unishard_deepspeed.masters import Piece

__all__ = [
    "link_states_again",
    "master_tensors",
    "pieces_of_masters",
    "replicated_masters",
    "set_masters",
    "torch_optimizer",
    "trained",
]

_MASTERS = (
    "fp32_partitioned_groups_flat",  # runtime/zero/stage3.py
    "single_partition_of_fp32_groups",  # runtime/zero/stage_1_and_2.py
    "fp32_groups_flat_partition",  # runtime/bf16_optimizer.py
)


def master_tensors(optimizer: Any) -> list[Tensor]:
    """The live fp32 masters on this rank: flat partitions, or whole tensors at stage 0."""
    for name in _MASTERS:
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    groups = getattr(optimizer, "fp32_groups", None)  # runtime/fp16/unfused_optimizer.py
    if groups is None:
        groups = [group["params"] for group in optimizer.param_groups]
    return [tensor for group in groups for tensor in group]


@torch.no_grad()
def set_masters(optimizer: Any, originals: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Copy fp32 weights into the masters. Every rank needs all of them: whole ones, at stage 3 its own parts.

    DeepSpeed's own `safe_set_full_fp32_param` fails at stage 3 where the ranks do not divide a parameter.
    """
    replicated = replicated_masters(optimizer)
    for parameter, value in originals:
        if parameter in replicated:
            replicated[parameter].copy_(value)
        elif hasattr(parameter, "ds_id"):
            part, _ = optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False)  # runtime/zero/stage3.py
            part.data[: value.numel()].copy_(value)
        else:
            parameter.set_full_hp_param(value)  # type: ignore[attr-defined]  # utils/tensor_fragment.py


def replicated_masters(optimizer: Any) -> dict[Tensor, Tensor]:
    """Stage 0 with masters: each parameter's whole one (runtime/fp16/unfused_optimizer.py)."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {lp: hp for lps, hps in pairs for lp, hp in zip(lps, hps, strict=True)}


def torch_optimizer(optimizer: Any) -> Any:
    """The user's torch optimizer inside DeepSpeed's; at stage 0 in fp32 there is no other."""
    return getattr(optimizer, "optimizer", optimizer)


def trained(optimizer: Any) -> list[nn.Parameter]:
    """The module's parameters that DeepSpeed updates, in the same order on every rank."""
    for name in ("fp16_groups", "bit16_groups", "bf16_groups"):  # stage3.py and unfused_optimizer.py, stage_1_and_2.py, bf16_optimizer.py
        if hasattr(optimizer, name):
            return [parameter for group in getattr(optimizer, name) for parameter in group]
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def pieces_of_masters(optimizer: Any) -> dict[Tensor, list[Piece]]:
    """Of each master on this rank, where the parameters lie in it."""
    pieces: dict[Tensor, list[Piece]] = {}
    replicated = replicated_masters(optimizer)
    for parameter in trained(optimizer):
        if hasattr(parameter, "ds_id"):
            group, start, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]  # runtime/zero/stage3.py
            master = optimizer.fp32_partitioned_groups_flat[group]
        elif hasattr(parameter, "_hp_mapping"):  # utils/tensor_fragment.py
            mapping = parameter._hp_mapping
            if mapping is None:
                continue  # it lies in other ranks' parts
            start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
            master = master_tensors(optimizer)[mapping.param_group_index]
        else:
            master = replicated.get(parameter, parameter)
            start, numel = 0, parameter.numel()
        if numel:
            pieces.setdefault(master, []).append(Piece(parameter, start, numel))
    return pieces


def link_states_again(optimizer: Any) -> None:
    """DeepSpeed looks for the optimizer's state after its first update alone; let it look after the next one too.

    (_lazy_init_hp_params_optimizer_state in runtime/zero/stage3.py, stage_1_and_2.py and bf16_optimizer.py)
    """
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
