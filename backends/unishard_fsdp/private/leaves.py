"""Gathered parameters of sharded modules: their dtypes, and dropping their unreduced gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unishard_fsdp.private.groups import groups_of


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
