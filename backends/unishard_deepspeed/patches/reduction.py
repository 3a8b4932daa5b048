"""How DeepSpeed gathers the units of a model and reduces their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from unishard_deepspeed.patches.optimizer_kind import Kind

__all__ = [
    "drop",
    "gather",
    "reduce_last",
    "reduce_units_by_parameter",
    "without_gathering",
]


def reduce_units_by_parameter(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Stage 3: reduce a leaf module's gradients as they come. Collective.

    DeepSpeed waits for a full backward hook of the leaf module, which torch fires before the module's own gradients exist
    when none of its positional inputs needs a gradient (an embedding, the first layer, inputs passed by keyword), and which
    then puts zeros in their place (runtime/zero/stage3.py, create_reduce_and_remove_grad_hooks). The parameters are still
    gathered together: that depends on the module's flag alone.

    Args:
        optimizer: Of stage 3.
        parameters: All that it trains.
    """
    in_leaves = [parameter for parameter in parameters if hasattr(parameter, "ds_z3_leaf_module")]
    if not in_leaves:
        return
    for hook in (*optimizer._grad_acc_hooks, *optimizer._leaf_module_hooks):
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    optimizer._leaf_module_hooks.clear()
    for parameter in in_leaves:
        del parameter.ds_z3_leaf_module
    optimizer.create_reduce_and_remove_grad_hooks()


def without_gathering(optimizer: Any, modules: Iterable[nn.Module]) -> None:
    """Stage 3: take DeepSpeed's hooks off some modules, so that entering one on some ranks only is no collective.

    It also compares the order of the modules that were entered between the ranks (runtime/zero/partitioned_param_coordinator.py,
    reset_step), and records it in those hooks.
    """
    hooked = {id(hooks) for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)}
    offload = optimizer.parameter_offload  # runtime/zero/parameter_offload.py
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooked:
            handle.remove()


def gather(parameters: list[nn.Parameter]) -> None:
    """Stage 3: gather parameters; those that are gathered already stay as they are. Collective."""
    missing = [parameter for parameter in parameters if parameter.data.numel() != parameter.ds_numel]  # type: ignore[attr-defined]
    if missing:
        missing[0].all_gather(missing)  # type: ignore[attr-defined]  # runtime/zero/partition_parameters.py


def drop(parameters: list[nn.Parameter]) -> None:
    """Stage 3: keep only this rank's part of parameters."""
    parameters[0].partition(parameters)  # type: ignore[attr-defined]  # runtime/zero/partition_parameters.py


def reduce_last(optimizer: Any, parameters: Sequence[nn.Parameter], kind: Kind) -> None:
    """Reduce the gradients of some parameters when backward has ended, in this order, zeros for those that are missing. Collective.

    DeepSpeed reduces gradients in the order in which they come, so that ranks that use different parameters would add up different
    ones. Stage 0 puts zeros itself (runtime/engine.py).
    """
    last = set(parameters)
    if kind == "stage-3":  # runtime/zero/stage3.py
        _create_hooks(optimizer, optimizer.create_reduce_and_remove_grad_hooks, last)
        _before(optimizer, "independent_gradient_partition_epilogue", partial(_reduce_at_stage_3, optimizer, parameters))
    elif kind == "bf16-stage-1":  # runtime/bf16_optimizer.py
        _before(optimizer, "get_grads_for_norm", partial(_count_at_stage_1, optimizer, last))
    elif kind == "stages-1-2":  # runtime/zero/stage_1_and_2.py
        _reduce_flat_last(optimizer, parameters, last)


def _reduce_flat_last(optimizer: Any, parameters: Sequence[nn.Parameter], last: Collection[nn.Parameter]) -> None:
    groups = {parameter: index for index, group in enumerate(optimizer.bit16_groups) for parameter in group if parameter in last}
    if optimizer.partition_gradients:
        _create_hooks(optimizer, optimizer.create_gradient_handling_hooks, last)
        _before(optimizer, "independent_gradient_partition_epilogue", partial(_reduce_at_stage_2, optimizer, parameters, groups))
    else:
        _before(optimizer, "reduce_gradients", partial(_fill_at_stage_1, optimizer, parameters, groups))


def _create_hooks(optimizer: Any, create: Callable[[], None], without: Iterable[nn.Parameter]) -> None:
    """Create the hooks that reduce gradients anew, for all but some parameters."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    for parameter in without:
        parameter.requires_grad_(False)
    create()
    for parameter in without:
        parameter.requires_grad_(True)


def _before(optimizer: Any, name: str, first: Callable[[], None]) -> None:
    original = getattr(optimizer, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(optimizer, name, both)


def _reduce_at_stage_3(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            # The parameter may be in parts again, and torch compares its shape when a gradient is set.
            parameter.grad.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)  # type: ignore[attr-defined]
        optimizer.reduce_ready_partitions_and_remove_grads(parameter)


def _count_at_stage_1(optimizer: Any, parameters: Collection[nn.Parameter]) -> None:
    """BF16_Optimizer reduces all gradients as one buffer, but leaves those that this rank had no part in out of norm and clipping."""
    for index, group in enumerate(optimizer.bf16_groups):
        for position, parameter in enumerate(group):
            if parameter in parameters:
                optimizer.fp32_groups_has_gradients[index][position] = True


def _fill_at_stage_1(optimizer: Any, parameters: Sequence[nn.Parameter], groups: dict[nn.Parameter, int]) -> None:
    """All gradients are reduced at the end of a window, in the order of the parameters, those that are missing left out."""
    for parameter in parameters:
        if optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.process_gradients(parameter, groups[parameter])


def _reduce_at_stage_2(optimizer: Any, parameters: Sequence[nn.Parameter], groups: dict[nn.Parameter, int]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.process_gradients(parameter, groups[parameter])
