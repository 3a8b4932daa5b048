"""Gradients that FSDP2 has accumulated but not reduced, where micro-batches use different parameters; torch 2.15 does this itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unishard_fsdp.patches.groups import groups_of, has_no_gradient

__all__ = ["mend"]

_MENDED = "_unishard_mended"
_SUMMED = "_unishard_summed"
"""Where a group of parameters keeps that it is mended, and which of them have been summed, in order."""


def mend(modules: Iterable[Any]) -> None:
    """Mend what happens after the backward of sharded modules (_fsdp_param_group.py, FSDPParamGroup.post_backward), once each."""
    for group in groups_of(modules):
        if not hasattr(group, _MENDED):
            setattr(group, _MENDED, True)
            group.post_backward = partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        # No forward has entered this module yet. torch says that the call then does nothing, but while gradients are not reduced
        # it looks for parameters that only the first forward makes ("no attribute '_unsharded_param'").
        return
    _keep_sums_aligned(group)
    if group.reduce_grads and any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
        _in_one_dtype(group)
    post_backward(*unused)


def _in_one_dtype(group: Any) -> None:
    """Bring a module's gradients into the dtype in which some of them have been added up already.

    FSDP2 adds up in `reduce_dtype` what it does not reduce yet, and then refuses to reduce it together with the bf16 gradient
    of a parameter that only the last micro-batch used, or with bf16 zeros for an unused one ("expects uniform gradient dtype").
    """
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        if _fills(group) and has_no_gradient(parameter):
            parameter.unsharded_accumulated_grad = torch.zeros_like(parameter.unsharded_param, dtype=parameter.reduce_dtype)


def _keep_sums_aligned(group: Any) -> None:
    """Let a module's gradients that wait for the reduction between groups of ranks keep their places.

    FSDP2 adds them up as one flat tensor of the parameters that had a gradient (_fsdp_collectives.py, foreach_reduce). Other
    parameters in the next micro-batch make it another tensor: an error about its size, a sum at wrong places where the sizes
    agree by chance, and where the last micro-batch has no gradient at all a sum that is left for the next window.
    """
    if not group.reduce_grads or (group.all_reduce_grads and group._partial_reduce_output is None):
        return
    summed: list[Any] = getattr(group, _SUMMED, []) if group._partial_reduce_output is not None else []
    for parameter in summed:
        if has_no_gradient(parameter):
            parameter.unsharded_accumulated_grad = torch.zeros_like(parameter.unsharded_param, dtype=parameter.reduce_dtype)
    reduced = [
        parameter
        for parameter in group.fsdp_params
        if parameter.unsharded_param.requires_grad and (_fills(group) or not has_no_gradient(parameter))
    ]
    if summed and reduced != summed:
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in summed]
        pieces = dict(zip(map(id, summed), torch.split(group._partial_reduce_output, sizes), strict=True))
        group._partial_reduce_output = torch.cat([_piece(parameter, pieces, group) for parameter in reduced])
    setattr(group, _SUMMED, reduced)


def _piece(parameter: Any, pieces: dict[int, Tensor], group: Any) -> Tensor:
    """A parameter's share of the sum; zeros where it had no gradient yet."""
    size = parameter.padded_sharded_param_size.numel()
    found = pieces.get(id(parameter))
    return found if found is not None else group._partial_reduce_output.new_zeros(size)


def _fills(group: Any) -> bool:
    """Whether `set_reduce_scatter_unused_params` was called, which torch has from 2.13 on."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))
