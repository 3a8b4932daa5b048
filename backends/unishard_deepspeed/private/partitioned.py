"""Parameters that stage 3 partitions, whether it trains them or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard, write_shard
from unishard.distributed.slices import of_full, own_part
from unishard_deepspeed.private.table import OF_STAGE_3


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether this rank holds only its shard of a parameter, unless it is gathered."""
    return hasattr(parameter, "ds_tensor")


def shard_in(parameter: Any, padded: Tensor) -> Shard:
    """This rank's shard of a parameter, in a tensor that is padded at the end."""
    # runtime/zero/partition_parameters.py
    start = min(padded.numel() * parameter.ds_zero_partition_rank, parameter.ds_numel)
    values = padded.detach().view(-1)[: parameter.ds_numel - start]
    return of_full(parameter, Shard(parameter.ds_shape, values, start, parameter.ds_process_group))


def own_shard(parameter: Any) -> Shard:
    """This rank's shard of the parameter itself."""
    return shard_in(parameter, parameter.ds_tensor)


def shards(model: nn.Module) -> list[Tensor]:
    """This rank's shards of the partitioned parameters, padded, as DeepSpeed holds them."""
    return [each.ds_tensor for each in model.parameters() if is_partitioned(each)]  # type: ignore[attr-defined]


def write(parameter: Any, value: Tensor) -> None:
    """Write a full value into this rank's shard, and into the parameter if it is gathered now."""
    write_shard(own_shard(parameter), value)
    if parameter.data.shape == parameter.ds_shape:
        parameter.data.copy_(own_part(parameter, value))


def gather(parameters: list[nn.Parameter]) -> None:
    """Gather parameters that are not gathered yet. Collective."""
    missing = [parameter for parameter in parameters if parameter.data.numel() != parameter.ds_numel]  # type: ignore[attr-defined]
    if missing:
        missing[0].all_gather(missing)  # type: ignore[attr-defined]  # runtime/zero/partition_parameters.py


def drop(parameters: list[nn.Parameter]) -> None:
    """Keep only this rank's shards of parameters."""
    parameters[0].partition(parameters)  # type: ignore[attr-defined]  # runtime/zero/partition_parameters.py


def gather_after(optimizer: Any) -> None:
    """On CUDA: let the next gathers wait on the device for the shards that were written just now.

    DeepSpeed gathers on a stream that waits for nothing (runtime/zero/partitioned_param_coordinator.py), so a loop that
    reads nothing between a write, such as an update, and the next forward may gather shards before they are written.

    Args:
        optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
    """
    if OF_STAGE_3.gathers.works:
        _offload_of(optimizer)._DeepSpeedZeRoOffload__allgather_stream.wait_stream(torch.cuda.current_stream())
    else:
        torch.cuda.current_stream().synchronize()


def free_after_gathers(optimizer: Any) -> None:
    """On CUDA: free parameters that were prefetched and not used on the stream that gathered them.

    A forward prefetches for its backward. If none comes, as in an evaluation, the next forward frees what was
    prefetched: it waits for the all-gather on the compute stream, but the memory belongs to the stream that gathers,
    which may give it to the next all-gather before (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py,
    _clean_inflight_param_registry).

    Args:
        optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
    """
    if not OF_STAGE_3.frees.works:
        return
    offload = _offload_of(optimizer)
    coordinator, stream = offload.get_param_coordinator(), offload._DeepSpeedZeRoOffload__allgather_stream
    free = coordinator._clean_inflight_param_registry

    def free_on_stream() -> None:
        with torch.cuda.stream(stream):
            free()

    coordinator._clean_inflight_param_registry = free_on_stream


def remove_hooks(optimizer: Any, modules: Iterable[nn.Module]) -> None:
    """Remove DeepSpeed's hooks from some modules, so that entering them is not collective.

    DeepSpeed also compares between ranks the order in which modules were entered, recorded by those hooks
    (runtime/zero/partitioned_param_coordinator.py, reset_step).

    Args:
        optimizer: DeepSpeed's, which without training is its `DeepSpeedZeRoOffload`.
        modules: The modules, without what is inside them.
    """
    hooked = {id(hooks) for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)}
    offload = _offload_of(optimizer)
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooked:
            handle.remove()


def _offload_of(optimizer: Any) -> Any:
    return getattr(optimizer, "parameter_offload", optimizer)  # runtime/zero/parameter_offload.py


def free_never(parameters: Iterable[Any]) -> None:
    """Let no module free these parameters, as in `not_freed`, chosen by name.

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
