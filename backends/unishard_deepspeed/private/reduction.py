"""Changes to how DeepSpeed gathers units and reduces their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from unishard_deepspeed.kind import Kind


def reduce_units_by_parameter(optimizer: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Stage 3: reduce a leaf module's gradients one by one, as they are computed. Collective.

    DeepSpeed uses a full backward hook of the leaf module. torch fires it before the module's gradients exist if no
    positional input requires a gradient (an embedding, the first layer, inputs passed by keyword), and the hook then
    uses zeros (runtime/zero/stage3.py, create_reduce_and_remove_grad_hooks). The parameters are still gathered
    together, which depends only on the module's flag.

    Args:
        optimizer: DeepSpeed's optimizer at stage 3.
        parameters: All its trainable parameters.
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


def reduce_in_fp32(optimizer: Any) -> None:
    """Stage 2: reduce gradients from fp32 buffers; they have the dtype of the first parameter, and would round
    gradients in fp32.
    """
    optimizer._gradient_reduction_buffer_dtype = lambda: torch.float32  # runtime/zero/stage_1_and_2.py, setup_buckets


def remove_hooks(optimizer: Any, modules: Iterable[nn.Module]) -> None:
    """Stage 3: remove DeepSpeed's hooks from some modules, so that entering them is not collective.

    DeepSpeed also compares between ranks the order in which modules were entered, recorded by those hooks
    (runtime/zero/partitioned_param_coordinator.py, reset_step).

    Args:
        optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
        modules: The modules, without what is inside them.
    """
    hooked = {id(hooks) for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)}
    offload = getattr(optimizer, "parameter_offload", optimizer)  # runtime/zero/parameter_offload.py
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooked:
            handle.remove()


def gather(parameters: list[nn.Parameter]) -> None:
    """Stage 3: gather parameters that are not gathered yet. Collective."""
    missing = [parameter for parameter in parameters if parameter.data.numel() != parameter.ds_numel]  # type: ignore[attr-defined]
    if missing:
        missing[0].all_gather(missing)  # type: ignore[attr-defined]  # runtime/zero/partition_parameters.py


def drop(parameters: list[nn.Parameter]) -> None:
    """Stage 3: keep only this rank's shards of parameters."""
    parameters[0].partition(parameters)  # type: ignore[attr-defined]  # runtime/zero/partition_parameters.py


def reduce_last(optimizer: Any, parameters: Sequence[nn.Parameter], kind: Kind) -> None:
    """Reduce the gradients of some parameters after backward, in this order, with zeros for missing ones. Collective.

    DeepSpeed reduces gradients in the order in which they are computed, so ranks that use different parameters would
    reduce different ones together. Stage 0 uses zeros by itself (runtime/engine.py).
    """
    last = set(parameters)
    if kind == "stage-3":  # runtime/zero/stage3.py
        _create_hooks(optimizer, optimizer.create_reduce_and_remove_grad_hooks, last)
        _call_before(
            optimizer, "independent_gradient_partition_epilogue", partial(_reduce_at_stage_3, optimizer, parameters)
        )
    elif kind == "stages-1-2":  # runtime/zero/stage_1_and_2.py
        _reduce_flat_last(optimizer, parameters, last)


def _reduce_flat_last(optimizer: Any, parameters: Sequence[nn.Parameter], last: Collection[nn.Parameter]) -> None:
    groups = {
        parameter: index
        for index, group in enumerate(optimizer.bit16_groups)
        for parameter in group
        if parameter in last
    }
    if optimizer.partition_gradients:
        _create_hooks(optimizer, optimizer.create_gradient_handling_hooks, last)
        _call_before(
            optimizer,
            "independent_gradient_partition_epilogue",
            partial(_reduce_at_stage_2, optimizer, parameters, groups),
        )
    else:
        _call_before(optimizer, "reduce_gradients", partial(_fill_at_stage_1, optimizer, parameters, groups))


def _create_hooks(optimizer: Any, create: Callable[[], None], without: Iterable[nn.Parameter]) -> None:
    """Recreate the hooks that reduce gradients, except for some parameters."""
    for hook in optimizer._grad_acc_hooks:
        hook.remove()
    optimizer._grad_acc_hooks.clear()
    for parameter in without:
        parameter.requires_grad_(False)
    create()
    for parameter in without:
        parameter.requires_grad_(True)


def _call_before(optimizer: Any, name: str, first: Callable[[], None]) -> None:
    original = getattr(optimizer, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    setattr(optimizer, name, both)


def _reduce_at_stage_3(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            # The parameter may be sharded again, and torch checks its shape when a gradient is set.
            parameter.grad.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=parameter.device)  # type: ignore[attr-defined]
        optimizer.reduce_ready_partitions_and_remove_grads(parameter)


def _fill_at_stage_1(optimizer: Any, parameters: Sequence[nn.Parameter], groups: dict[nn.Parameter, int]) -> None:
    """Create zeros for missing gradients, which DeepSpeed otherwise omits when it reduces all at the end of a
    window.
    """
    for parameter in parameters:
        if optimizer.get_gradient_for_reduction(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.process_gradients(parameter, groups[parameter])


def _reduce_at_stage_2(optimizer: Any, parameters: Sequence[nn.Parameter], groups: dict[nn.Parameter, int]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.process_gradients(parameter, groups[parameter])


def free_never(parameters: Iterable[Any]) -> None:
    """Stage 3: let no module free these parameters, as in `not_freed`, chosen by name.

    DeepSpeed's own setting, `stage3_param_persistence_threshold`, chooses parameters by their size, and frees them in
    the first forward and backward all the same (runtime/zero/partitioned_param_coordinator.py, release_sub_module).
    """
    for parameter in parameters:
        parameter.is_external_param = True


@contextmanager
def not_freed(parameters: Sequence[Any]) -> Iterator[None]:
    """A block in which modules do not free these parameters.

    DeepSpeed frees a parameter after the forward and the backward of each module that has it, unless it is `external`:
    used outside its module (runtime/zero/partitioned_param_coordinator.py, release_sub_module). A context of
    `GatheredParameters` does not prevent that.
    """
    before = [parameter.is_external_param for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.is_external_param = True
        yield
    finally:
        for parameter, external in zip(parameters, before, strict=True):
            parameter.is_external_param = external
