"""What can only be done to torch 2.13 at private names, gathered here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState  # private path; the only one in torch 2.13
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "FixedBuckets",
    "count_as_stepped",
    "drop_unreduced",
    "fill_unused",
    "gathered_leaves",
    "mend_post_backward",
    "refresh_trainable",
]


class FixedBuckets(DistributedDataParallel):
    """DDP that reduces in the same buckets from the first update on, those of the parameters from the last to the first.

    DDP itself begins with one bucket and makes them anew after the first backward, in the order in which the gradients came (reducer.cpp,
    rebuild_buckets). The bucket decides in which order more than two ranks are added up, so a run that goes on from a checkpoint would
    differ in its first update from the one that was not interrupted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:  # makes no buckets anew, and begins with those of the reversed order
            return parameters, sparse
        return parameters[::-1], sparse[::-1]


def drop_unreduced(parts: Iterable[Any]) -> None:
    """Forget the gradients that have been accumulated but not reduced (_fully_shard/_fsdp_param.py); `reset_iter_state` keeps them."""
    for part in parts:
        for group in part._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def count_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep a scheduler from warning that its optimizer is never stepped, where another object of its class is (optim/lr_scheduler.py)."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def mend_post_backward(parts: Iterable[Any]) -> None:
    """Mend what happens after the backward of each sharded module (_fully_shard/_fsdp_param_group.py, FSDPParamGroup.post_backward)."""
    for part in parts:
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group.post_backward = partial(_post_backward, group, group.post_backward)


def fill_unused(parts: Iterable[Any], whole: Collection[Tensor], used: set[Tensor]) -> None:
    """Let every rank reduce the same parameters in the same order, also where it did not use some of them.

    Args:
        parts: Sharded modules, the root first.
        whole: Sharded parameters whose gradient counts as zero on a rank that does not use them.
        used: Filled with those of them that this rank has used.
    """
    groups = [group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups]
    for group in groups:
        filled = [parameter for parameter in group.fsdp_params if parameter.sharded_param in whole]
        if filled:
            group.post_backward = partial(_fill, group, filled, used, group.post_backward)
    groups[0].post_backward = partial(_after_the_others, groups[:0:-1], groups[0].post_backward)


def _fill(group: Any, filled: Sequence[Any], used: set[Tensor], post_backward: Callable[..., None], *unused: Any) -> None:
    for parameter in filled:
        if not hasattr(parameter, "_unsharded_param"):
            continue
        if parameter.unsharded_param.grad is not None:
            used.add(parameter.sharded_param)
        elif group.reduce_grads and _has_no_gradient(parameter):
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
    post_backward(*unused)


def _after_the_others(others: Sequence[Any], post_backward: Callable[..., None], *unused: Any) -> None:
    """Reduce the root last, on every rank.

    A module whose inputs need no gradient is reduced after the root, when backward has ended (_fully_shard/_fsdp_state.py,
    FSDPState._root_post_backward_final_callback), else before it. Behind a tower that some ranks leave out, that differs between ranks.
    """
    for group in others:
        if group._training_state is not TrainingState.POST_BACKWARD:
            group.post_backward()
    post_backward(*unused)


def refresh_trainable(parts: Iterable[Any]) -> None:
    """Let sharded modules see that `requires_grad` of their parameters has changed.

    The whole parameters take it over when they are gathered, but the format of reduction is found among the trainable ones in the
    first forward, once and for all (_fully_shard/_fsdp_param_group.py, FSDPParamGroup._init_mp_dtypes): a module that was frozen
    then would be reduced in the compute format.
    """
    for part in parts:
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group._init_mp_dtypes()


def gathered_leaves(parts: Iterable[Any]) -> list[Tensor]:
    """The gathered parameters, on which autograd leaves gradients until they are reduced (_fully_shard/_fsdp_param.py)."""
    parameters = [parameter for part in parts for group in part._get_fsdp_state()._fsdp_param_groups for parameter in group.fsdp_params]
    whole = [getattr(parameter, "_unsharded_param", None) for parameter in parameters]
    return [tensor for tensor in whole if tensor is not None and tensor.requires_grad]


def _post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        # No forward has entered this module yet. torch says that the call then does nothing, but while gradients are not reduced
        # it looks for parameters that only the first forward makes ("no attribute '_unsharded_param'").
        return
    _keep_sums_aligned(group)
    if group.reduce_grads and any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
        _in_one_format(group)
    post_backward(*unused)


def _in_one_format(group: Any) -> None:
    """Bring a module's gradients into the format in which some of them have been added up already.

    FSDP2 adds up in `reduce_dtype` what it does not reduce yet, and then refuses to reduce it together with the bf16 gradient
    of a parameter that only the last micro-batch used, or with bf16 zeros for an unused one ("expects uniform gradient dtype").
    """
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        if group.reduce_scatter_unused_params and _has_no_gradient(parameter):
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
        if _has_no_gradient(parameter):
            parameter.unsharded_accumulated_grad = torch.zeros_like(parameter.unsharded_param, dtype=parameter.reduce_dtype)
    reduced = [
        parameter
        for parameter in group.fsdp_params
        if parameter.unsharded_param.requires_grad and (group.reduce_scatter_unused_params or not _has_no_gradient(parameter))
    ]
    if summed and reduced != summed:
        sizes = [parameter.padded_sharded_param_size.numel() for parameter in summed]
        pieces = dict(zip(map(id, summed), torch.split(group._partial_reduce_output, sizes), strict=True))
        group._partial_reduce_output = torch.cat([_piece(parameter, pieces, group) for parameter in reduced])
    setattr(group, _SUMMED, reduced)


_SUMMED = "_unishard_summed"
"""Where a module's group of parameters keeps which of them have been summed, in order."""


def _piece(parameter: Any, pieces: dict[int, Tensor], group: Any) -> Tensor:
    """A parameter's part of the sum; zeros where it had no gradient yet."""
    size = parameter.padded_sharded_param_size.numel()
    found = pieces.get(id(parameter))
    return found if found is not None else group._partial_reduce_output.new_zeros(size)


def _has_no_gradient(parameter: Any) -> bool:
    whole = parameter.unsharded_param
    return bool(whole.requires_grad) and whole.grad is None and parameter.unsharded_accumulated_grad is None
