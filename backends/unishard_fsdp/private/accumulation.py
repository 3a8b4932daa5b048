"""Fix unreduced gradients when micro-batches use different parameters; torch 2.15 does this itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unishard_fsdp.private.groups import groups_of, has_no_gradient

_PATCHED = "_unishard_patched"
_SUMMED = "_unishard_summed"
"""Attributes of a parameter group: whether it is patched, and which parameters have been summed, in order."""


def patch_post_backward(modules: Iterable[Any]) -> None:
    """Patch `FSDPParamGroup.post_backward` of sharded modules (_fsdp_param_group.py), once each."""
    for group in groups_of(modules):
        if not hasattr(group, _PATCHED):
            setattr(group, _PATCHED, True)
            group.post_backward = partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        # No forward has entered this module yet. By torch's docs the call then does nothing, but without reduction it
        # reads parameters that only the first forward creates ("no attribute '_unsharded_param'").
        return
    _keep_sums_aligned(group)
    if group.reduce_grads and any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
        _in_one_dtype(group)
    post_backward(*unused)


def _in_one_dtype(group: Any) -> None:
    """Cast a module's gradients to the dtype in which some of them have been accumulated.

    FSDP2 accumulates unreduced gradients in `reduce_dtype`, and then cannot reduce them together with the bf16 gradient
    of a parameter that only the last micro-batch used, or with bf16 zeros for an unused one ("expects uniform gradient
    dtype").
    """
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        if _fills(group) and has_no_gradient(parameter):
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                parameter.unsharded_param, dtype=parameter.reduce_dtype
            )


def _keep_sums_aligned(group: Any) -> None:
    """Keep the positions of gradients that wait for the reduction between groups of ranks.

    FSDP2 sums them as one flat tensor of the parameters that had a gradient (_fsdp_collectives.py, foreach_reduce). If
    the next micro-batch uses other parameters, the layout differs: an error about the size, wrong sums if the sizes
    happen to agree, and if the last micro-batch has no gradients, a sum that remains for the next window.
    """
    if not group.reduce_grads or (group.all_reduce_grads and group._partial_reduce_output is None):
        return
    summed: list[Any] = getattr(group, _SUMMED, []) if group._partial_reduce_output is not None else []
    for parameter in summed:
        if has_no_gradient(parameter):
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                parameter.unsharded_param, dtype=parameter.reduce_dtype
            )
    reduced = [
        parameter
        for parameter in group.fsdp_params
        if parameter.unsharded_param.requires_grad and (_fills(group) or not has_no_gradient(parameter))
    ]
    if summed and reduced != summed:
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in summed]
        sums = dict(zip(map(id, summed), torch.split(group._partial_reduce_output, sizes), strict=True))
        group._partial_reduce_output = torch.cat([_sum_of(parameter, sums, group) for parameter in reduced])
    setattr(group, _SUMMED, reduced)


def _sum_of(parameter: Any, sums: dict[int, Tensor], group: Any) -> Tensor:
    """A parameter's part of the sum; zeros if it had no gradient yet."""
    size = parameter.padded_sharded_param_size.numel()
    total = sums.get(id(parameter))
    return total if total is not None else group._partial_reduce_output.new_zeros(size)


def _fills(group: Any) -> bool:
    """Whether `set_reduce_scatter_unused_params` was called (torch 2.13 or newer)."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))
