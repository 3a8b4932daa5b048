"""Conditional modules (`sharding.conditional_modules`): make every rank reduce the same parameters in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unishard_fsdp.private.groups import groups_of, has_no_gradient


def fill_unused(modules: Iterable[Any], conditional: Collection[Tensor], used: set[Tensor]) -> None:
    """Make every rank reduce the same parameters in the same order, even if it did not use some of them.

    Args:
        modules: Sharded modules, the root first.
        conditional: Sharded parameters whose gradient is zero on ranks that do not use them.
        used: Output: those of them that this rank has used.
    """
    groups = groups_of(modules)
    for group in groups:
        filled = [parameter for parameter in group.fsdp_params if parameter.sharded_param in conditional]
        if filled:
            group.post_backward = partial(_fill, group, filled, used, group.post_backward)
    groups[0].post_backward = partial(_after_the_others, groups[:0:-1], groups[0].post_backward)


def _fill(
    group: Any, filled: Sequence[Any], used: set[Tensor], post_backward: Callable[..., None], *unused: Any
) -> None:
    for parameter in filled:
        if not hasattr(parameter, "_unsharded_param"):
            continue
        gathered = parameter.unsharded_param
        if gathered.grad is not None:
            used.add(parameter.sharded_param)
        elif group.reduce_grads and has_no_gradient(parameter):
            gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
    post_backward(*unused)


def _after_the_others(others: Sequence[Any], post_backward: Callable[..., None], *unused: Any) -> None:
    """Reduce the root last, on every rank.

    A module whose inputs need no gradient is reduced after the root, at the end of backward
    (_fully_shard/_fsdp_state.py, FSDPState._root_post_backward_final_callback), otherwise before it. After a tower that
    some ranks skip, this differs between ranks.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for group in others:
        if group._training_state is not TrainingState.POST_BACKWARD:
            group.post_backward()
    post_backward(*unused)
