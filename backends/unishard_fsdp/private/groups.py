"""Access to a sharded module's parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state


def groups_of(modules: Iterable[Any]) -> list[Any]:
    """The parameter groups of sharded modules, in order; one per module before torch 2.12."""
    found = []
    for module in modules:
        state = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        found += [group for group in groups if group is not None]
    return found


def has_no_gradient(parameter: Any) -> bool:
    """Whether a group's gathered parameter is trainable and has no gradient yet."""
    gathered = parameter.unsharded_param
    return bool(gathered.requires_grad) and gathered.grad is None and parameter.unsharded_accumulated_grad is None


# -- Gathered parameters of sharded modules: their dtypes, and dropping their unreduced gradients --


def drop_unreduced(modules: Iterable[Any]) -> None:
    """Drop gradients that are accumulated but not reduced (_fsdp_param.py); in torch 2.15 `reset_iter_state` does
    so.
    """
    for group in groups_of(modules):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def refresh_trainable(modules: Iterable[Any]) -> None:
    """Update sharded modules after `requires_grad` of their parameters has changed.

    Gathered parameters copy `requires_grad` when they are gathered, but the reduce dtype is determined from the
    trainable ones only once, in the first forward (_fsdp_param_group.py, FSDPParamGroup._init_mp_dtypes): a module that
    was frozen then would be reduced in the compute dtype.
    """
    for group in groups_of(modules):
        group._init_mp_dtypes()


# -- Forget that modules were sharded: `fully_shard` refuses those that have a state (torch 2.13, --
# _composable_state.py).


def forget_states(modules: Iterable[nn.Module]) -> None:
    """Forget the states of modules that are plain again."""
    for module in modules:
        _composable_state._module_state_mapping.pop(module, None)


# Parameters that stay in fp32 beside 16-bit ones of the same unit (`precision.keep_fp32`): FSDP2 has one dtype for
# each module.


def keep_fp32(modules: Iterable[Any], holds: Callable[[Tensor], bool]) -> None:
    """Gather parameters of sharded modules in fp32. An all-gather may hold several dtypes (_fsdp_collectives.py).

    Args:
        modules: Sharded modules.
        holds: Whether a sharded parameter stays in fp32.
    """
    for group in groups_of(modules):
        kept = [parameter for parameter in group.fsdp_params if holds(parameter.sharded_param)]
        if kept:
            group._init_mp_dtypes = partial(_init, kept, group._init_mp_dtypes)
            group.post_backward = partial(_post_backward, group, group.post_backward)


def _init(kept: Sequence[Any], init_mp_dtypes: Callable[[], None]) -> None:
    init_mp_dtypes()
    for parameter in kept:
        parameter.param_dtype = None


def _post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """Cast a module's 16-bit gradients to the reduce dtype, fp32, because FSDP2 reduces gradients of one dtype
    (foreach_reduce).
    """
    if group.reduce_grads:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
    post_backward(*unused)


# -- Conditional modules (`sharding.conditional_modules`) ------------------------------------------


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
