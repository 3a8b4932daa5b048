"""The gathered parameters of sharded modules, their dtypes, and gradients that are dropped before they are reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from unishard_fsdp.patches.groups import groups_of

__all__ = ["drop_unreduced", "gathered_leaves", "refresh_trainable"]


def drop_unreduced(modules: Iterable[Any]) -> None:
    """Forget gradients that are accumulated but not reduced (_fsdp_param.py); `reset_iter_state` does so from torch 2.15 on."""
    for group in groups_of(modules):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def refresh_trainable(modules: Iterable[Any]) -> None:
    """Let sharded modules see that `requires_grad` of their parameters has changed.

    The gathered parameters take it over when they are gathered, but the dtype of reduction is found among the trainable ones in the
    first forward, once and for all (_fsdp_param_group.py, FSDPParamGroup._init_mp_dtypes): a module that was frozen then would be
    reduced in the compute dtype.
    """
    for group in groups_of(modules):
        group._init_mp_dtypes()


def gathered_leaves(modules: Iterable[Any]) -> list[Tensor]:
    """The gathered parameters, on which autograd leaves gradients until they are reduced (_fsdp_param.py)."""
    parameters = [parameter for group in groups_of(modules) for parameter in group.fsdp_params]
    gathered = [getattr(parameter, "_unsharded_param", None) for parameter in parameters]
    return [tensor for tensor in gathered if tensor is not None and tensor.requires_grad]
