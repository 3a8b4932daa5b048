"""Parameters that stay in fp32 beside 16-bit ones of the same unit (`precision.keep_fp32`): FSDP2 has one dtype for
each module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from unishard_fsdp.private.groups import groups_of


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
