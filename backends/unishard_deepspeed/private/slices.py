"""Tells DeepSpeed which ranks hold slices, in its words for experts.

DeepSpeed then shards a slice over its holders, sums its gradient over them, divides the sum by all ranks, and adds the
squares of all peers in the norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.contract.private_api import PrivateApi
from unishard.distributed.slices import Slice, slice_of
from unishard_deepspeed.private.table import OF_STAGE_3

_numbers = count()
_MARKER = "unishard_slices"


def name_in_stage_3(model: nn.Module) -> None:
    """At stage 3, after parameters were sharded: as those of AutoEP (module_inject/auto_ep_layer.py), for which its
    optimizer looks by these attributes (runtime/zero/stage3.py, _autoep_expert_parallel_group,
    _gradient_averaging_world_size).
    """
    for parameter, name in _named(model, OF_STAGE_3.slices):
        parameter.ds_zero_placement_family = "autoep_expert"
        parameter.ds_zero_partition_group_name = name


@contextmanager
def named_as_moe(model: nn.Module, optimizer: torch.optim.Optimizer, needed: PrivateApi) -> Iterator[None]:
    """A block in which `deepspeed.initialize` takes slices for experts of its own `MoE` (moe/layer.py), whose optimizer
    groups have ranks of their own (runtime/zero/stage_1_and_2.py, is_moe_group, real_dp_process_group), and whose
    gradients stage 0 averages over these (runtime/engine.py, _reduce_expert_gradients).

    Args:
        model: Not sharded yet.
        optimizer: Has groups of slices apart from others.
        needed: Of DeepSpeed.
    """
    names = dict(_named(model, needed))
    for parameter, name in names.items():
        parameter.allreduce, parameter.group_name = False, name
    groups = [group for group in optimizer.param_groups if group["params"] and group["params"][0] in names]
    if not groups:  # frozen ones are only broadcast
        yield
        return
    for group in groups:
        group["moe"], group["name"] = True, names[group["params"][0]]
    model.add_module(_MARKER, _marker())
    try:
        yield
    finally:
        delattr(model, _MARKER)
        for group in groups:
            del group["moe"], group["name"]


def _named(model: nn.Module, needed: PrivateApi) -> Iterator[tuple[Any, str]]:
    """The slices of a model, and the names of their groups, which DeepSpeed keeps in tables of the process
    (utils/groups.py).
    """
    from deepspeed.utils import groups

    names: dict[Any, str] = {}
    for parameter in model.parameters():
        part = slice_of(parameter)
        if part is None:
            continue
        needed.require()
        if part.holders not in names:
            names[part.holders] = name = f"unishard_{next(_numbers)}"
            groups._EXPERT_PARALLEL_GROUP[name], groups._EXPERT_DATA_PARALLEL_GROUP[name] = part.peers, part.holders
            groups._EXPERT_PARALLEL_GROUP_RANKS[name] = _ranks(part, "peers")
            groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = _ranks(part, "holders")
        yield parameter, names[part.holders]


def _ranks(part: Slice, group: str) -> list[int]:
    return dist.get_process_group_ranks(getattr(part, group))


def _marker() -> nn.Module:
    """What shows that a model has experts."""
    from deepspeed.moe.layer import MoE

    class Marker(MoE):  # type: ignore[misc]
        num_experts = 1

        def __init__(self) -> None:
            nn.Module.__init__(self)

        def set_deepspeed_parallelism(self, *args: Any, **kwargs: Any) -> None:
            """The groups are there already."""

    return Marker()
