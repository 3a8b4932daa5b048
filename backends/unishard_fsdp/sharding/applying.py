"""Shard or replicate a model in place, as the native config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from unishard.config import Precision
from unishard.contract.kit.dtypes import cast_to_compute
from unishard.contract.kit.forwards import is_compiled
from unishard.contract.kit.kept_fp32 import all_kept, is_kept
from unishard.contract.kit.materialization import materialize
from unishard.contract.kit.replicated import is_replicated
from unishard.contract.units import Unit
from unishard.distributed.broadcast import broadcast, make_dense
from unishard.distributed.dtypes import dtype_named
from unishard.distributed.layout import rows
from unishard.distributed.process_group import mesh_of_ranks
from unishard.distributed.slices import holders_of
from unishard_fsdp.options import FullyShard, Mesh, MixedPrecision, Replicate
from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.private.slices import placement_of_slices
from unishard_fsdp.sharding import collective_settings
from unishard_fsdp.units.dimensionless import add_dimension
from unishard_fsdp.units.unit_forwards import UnitForwards

Apply = Callable[[nn.Module], object]

_MARK = "_is_fsdp_managed_module"


def load(
    model: nn.Module,
    units: Sequence[Unit],
    device: torch.device,
    apply: Apply | None = None,
    *,
    frozen: Precision | None = None,
    kept: Callable[[Tensor], range] | None = None,
) -> None:
    """Broadcast rank 0's model to every rank and shard it, one unit at a time, the root last. Collective.

    Besides shards, only one full unit at a time is on the device.

    Args:
        model: Full on rank 0; a parameter or buffer with several names is moved and broadcast once.
        units: Sharded before the root, which gets the other parameters.
        device: Where this rank computes.
        apply: Shards a module whose tensors have their data; None to not shard.
        frozen: For inference: freeze the model and cast it to this section's compute dtype.
        kept: What `apply` keeps of a parameter on this rank, which is all that is read of one in a file.
    """
    seen: set[Tensor] = set()
    queue: list[tuple[nn.Module, list[Tensor]]] = []
    for module in [*(unit.module for unit in reversed(units)), model]:
        own = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor not in seen]
        seen.update(own)
        queue.append((module, own))
    del seen
    while queue:
        module, own = queue.pop(0)
        broadcast(materialize(own, device, kept))
        if frozen is not None:
            cast_to_compute(own, frozen)
        # `fully_shard` refuses others; fused optimizers step the memory from the first element on (torch 2.13), gaps
        # included.
        make_dense(
            tensor for tensor in own if isinstance(tensor, nn.Parameter) and (apply is not None or _has_gaps(tensor))
        )
        del own[:]
        if apply is not None:
            _keep_attributes(apply, module)


def _has_gaps(tensor: Tensor) -> bool:
    """Whether a tensor's elements are not all of the memory between its first and its last, as for a slice of
    columns.
    """
    return (
        tensor.numel() > 0
        and sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        != tensor.numel()
    )


def _keep_attributes(apply: Apply, module: nn.Module) -> None:
    """Shard a module, and copy attributes that users have set on its parameters, such as a flag for an optimizer
    factory.
    """
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    own = type(module)
    apply(module)
    _keep_class_name(type(module), own)
    for name, parameter in module.named_parameters():
        vars(parameter).update(attributes[name])


def _keep_class_name(sharded: type[nn.Module], own: type[nn.Module]) -> None:
    """Give the subclass that `fully_shard` makes of a class the name of that class (torch 2.13, _fsdp_init.py,
    _apply_to_module).

    Models look up by the name of their class how their weights are saved and which outputs they record (transformers
    5.23, conversion_mapping.py, utils/output_capturing.py).
    """
    sharded.__name__, sharded.__qualname__, sharded.__module__ = own.__name__, own.__qualname__, own.__module__


def _run_as_unsharded(model: nn.Module) -> None:
    """Take the mark of `fully_shard` from modules, so that their forward is that of the plain model.

    Modules of transformers that find the mark run each layer, without LayerDrop (5.23, distributed/fsdp.py,
    is_fsdp_managed_module). It stays where `generate` reads it, to let ranks that have finished run on, and in compiled
    blocks, which torch then guards less.
    """
    blocks = [module for module in model.modules() if module is not model and is_compiled(module)]
    compiled = {inner for block in blocks for inner in block.modules()}
    for module in model.modules():
        if module not in compiled and not hasattr(module, "generate"):
            vars(module).pop(_MARK, None)


def _mesh(device: torch.device, axes: Mesh | None = None) -> DeviceMesh:
    """A mesh of all ranks on one axis, or with the axes of a hybrid strategy."""
    if axes is None:
        return mesh_of_ranks(device.type, (dist.get_world_size(),), ("shard",))
    return mesh_of_ranks(device.type, (axes.replicate, axes.shard), ("replicate", "shard"))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else dtype_named(name)


def _policy(policy: MixedPrecision, module: nn.Module, *, root: bool) -> MixedPrecisionPolicy:
    if all_kept(module):
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    # fp32 gradients are reduced in fp32 anyway. With the dtype, unreduced gradients fail where a module has not run
    # yet: FSDP2 reads the gathered parameters of every module to cast their gradients (torch 2.13, _fsdp_param.py,
    # to_accumulated_grad_if_needed).
    casts = policy.param_dtype is not None or policy.reduce_dtype != "float32"
    return MixedPrecisionPolicy(
        param_dtype=_dtype(policy.param_dtype),
        reduce_dtype=_dtype(policy.reduce_dtype) if casts else None,
        output_dtype=_dtype(policy.output_dtype) if root else None,
        cast_forward_inputs=policy.cast_forward_inputs and root,  # hooks cast those of units
    )


def apply_fully_shard(
    model: nn.Module,
    units: Sequence[Unit],
    device: torch.device,
    options: FullyShard,
    forwards: UnitForwards,
    *,
    frozen: Precision | None = None,
) -> list[nn.Module]:
    """Call `fully_shard` on each unit and the root; `frozen` as in `load`. Collective.

    Returns:
        The embeddings that are not gathered in backward.
    """
    add_dimension(model)
    mesh = _mesh(device, options.mesh)
    sizes = [unit.numel for unit in units]
    offload = OffloadPolicy()
    if options.offload_policy is not None:
        offload = CPUOffloadPolicy(pin_memory=options.offload_policy.pin_memory and device.type == "cuda")

    keeps = options.keep_last_unit and frozen is None
    kept = [model, *(unit.module for unit in units[-1:] if keeps)]
    embeddings = [unit.module for unit in units if unit.is_embedding and not options.unshard_embeddings_in_backward]
    ignored = {parameter for parameter in model.parameters() if is_replicated(parameter)}
    placed = placement_of_slices(model, mesh)

    def apply(module: nn.Module) -> None:
        frees = False if any(module is each for each in kept) else options.reshard_after_forward
        with forwards.around(module, frees=bool(frees)):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=frees,
                mp_policy=_policy(options.mp_policy, module, root=module is model),
                offload_policy=offload,
                ignored_params=ignored,
                **placed,
            )
        if any(module is each for each in embeddings):
            cast(FSDPModule, module).set_unshard_in_backward(False)

    shards = mesh["shard"]

    def own_rows(parameter: Tensor) -> range:
        if is_replicated(parameter):
            return rows(parameter.shape, 1).of(0)
        group = holders_of(parameter) or shards.get_group()
        return rows(parameter.shape, dist.get_world_size(group)).of(dist.get_rank(group))

    load(model, units, device, apply, frozen=frozen, kept=own_rows)
    _keep_fp32(model)
    _run_as_unsharded(model)
    collective_settings.apply(model, options)
    if options.reduce_scatter_unused_params:
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)
    if options.prefetch_numel and PRIVATE_API["pending-gathers"].works:
        limit = None if options.prefetch_numel == "next_unit" else options.prefetch_numel
        _set_prefetch(model, [unit.module for unit in units], sizes, limit)
    return embeddings


def apply_replicate(
    model: nn.Module, units: Sequence[Unit], device: torch.device, options: Replicate, forwards: UnitForwards
) -> None:
    """Call `fully_shard` over groups of one rank on each unit, so that all-reduces overlap backward, and on the root.

    Collective.
    """
    add_dimension(model)
    mesh = _mesh(device, Mesh(replicate=dist.get_world_size(), shard=1))
    placed = placement_of_slices(model, mesh)

    def apply(module: nn.Module) -> None:
        with forwards.around(module, frees=False):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=False,
                mp_policy=_policy(options.mp_policy, module, root=module is model),
                **placed,
            )

    load(model, units, device, apply)
    _keep_fp32(model)
    _run_as_unsharded(model)
    if options.reduce_scatter_unused_params:
        cast(FSDPModule, model).set_reduce_scatter_unused_params(True)


def _keep_fp32(model: nn.Module) -> None:
    """Gather and reduce marked parameters in fp32 beside the 16-bit ones of the same unit."""
    if any(is_kept(parameter) for parameter in model.parameters()):
        from unishard_fsdp.private.kept_fp32 import keep_fp32

        keep_fp32((module for module in model.modules() if isinstance(module, FSDPModule)), is_kept)


def _set_prefetch(model: nn.Module, units: list[nn.Module], sizes: list[int], limit: int | None) -> None:
    """Let each unit prefetch as many of the following units as fit into `limit` elements; without one, the next unit.

    Uses the order of the modules. If a model runs them in another order, units are gathered too early or unnecessarily;
    torch waits for these and frees them at the end of backward (torch 2.13, FSDPParamGroup.finalize_backward).
    """
    for order, lengths, prefetch in (
        (units, sizes, "set_modules_to_forward_prefetch"),
        (units[::-1], sizes[::-1], "set_modules_to_backward_prefetch"),
    ):
        for index, module in enumerate([model, *order]):
            following = list(accumulate(lengths[index:]))
            fitting = len(following[:1]) if limit is None else sum(total <= limit for total in following)
            if fitting:
                getattr(module, prefetch)(order[index : index + fitting])
