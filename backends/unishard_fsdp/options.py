"""The native config: the arguments of `fully_shard` or DistributedDataParallel as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from unishard.config.nested import Native

__all__ = [
    "CONSTANTS",
    "FORMS",
    "CPUOffload",
    "DistributedDataParallel",
    "FullyShard",
    "HostOptimizer",
    "Mesh",
    "MixedPrecision",
    "Options",
    "Replicate",
    "Timing",
    "constants_of",
    "parse",
]

Timing = Literal["every_micro_batch", "last_micro_batch"]
DType = Literal["float32", "bfloat16", "float16"]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class MixedPrecision(_Arguments):
    """`torch.distributed.fsdp.MixedPrecisionPolicy`, with dtypes by name."""

    param_dtype: DType | None
    """Format of the gathered parameters; null for their own."""
    reduce_dtype: DType | None
    """Format in which gradients are reduced; null for `param_dtype`."""
    output_dtype: DType | None
    """Format to which the root module's output is cast; null for none."""
    cast_forward_inputs: bool
    """Whether floating-point inputs of units and root are cast to `param_dtype`."""


class CPUOffload(_Arguments):
    """`torch.distributed.fsdp.CPUOffloadPolicy`."""

    pin_memory: bool
    """Page-locked host memory, where a CUDA device is present; torch 2.13 raises without one, so it is left out there."""


class HostOptimizer(_Arguments):
    """unishard's own: the torch optimizer steps host copies of the parts, whose state lies beside them."""

    pin_memory: bool
    """Page-locked copies, where a CUDA device is present."""


class Mesh(_Arguments):
    """A device mesh of two axes; ranks in a row are neighbours on the axis `shard`."""

    replicate: int
    """Groups, each of which holds a whole copy."""
    shard: int
    """Ranks that share one copy."""


class FullyShard(_Arguments):
    """FSDP2: `fully_shard` on each unit and on the root, and the flags that time its collectives."""

    data_parallel: Literal["fully_shard"]
    mesh: Mesh | None
    """The axes of a hybrid strategy; null for one axis, `shard`, of all ranks."""
    units: Literal["auto"] | list[str]
    """Classes of the modules that are gathered together, or `auto`."""
    min_unit_params: int
    """Smaller modules are no unit."""
    conditional_modules: list[str]
    """Classes of modules that a rank may not use; they belong to the unit around them."""
    reshard_after_forward: bool
    """For units; the root is never resharded after forward, since it is needed first in backward (torch's own default)."""
    reshard_after_backward: Timing
    """`set_reshard_after_backward`."""
    requires_gradient_sync: Timing
    """`set_requires_gradient_sync`."""
    requires_all_reduce: Timing | None
    """`set_requires_all_reduce`: when gradients are averaged over the axis `replicate`; null where there is none."""
    prefetch_numel: int | None
    """Elements that `set_modules_to_forward_prefetch` and `_backward_prefetch` may gather ahead; null for torch's own prefetch."""
    mp_policy: MixedPrecision
    offload_policy: CPUOffload | None
    host_optimizer: HostOptimizer | None
    """Where only the optimizer is offloaded and parameters are gathered unit by unit; null elsewhere."""
    reduce_scatter_unused_params: bool
    """`set_reduce_scatter_unused_params`: zero gradients for parameters without one, needed when ranks use different parameters."""


class Replicate(_Arguments):
    """`fully_shard` on a mesh of (ranks, 1): whole fp32 parameters on each rank with FSDP2's mixed precision."""

    data_parallel: Literal["replicate"]
    conditional_modules: list[str]
    """Classes of modules that a rank may not use."""
    reshard_after_backward: Timing
    """When the copy in `mp_policy.param_dtype` is freed."""
    requires_gradient_sync: Timing
    """`set_requires_gradient_sync`."""
    mp_policy: MixedPrecision
    reduce_scatter_unused_params: bool
    """`set_reduce_scatter_unused_params`: zero gradients for parameters without one, needed when ranks use different parameters."""


class DistributedDataParallel(_Arguments):
    """`torch.nn.parallel.DistributedDataParallel`, with torch's ZeroRedundancyOptimizer or without."""

    data_parallel: Literal["DistributedDataParallel"]
    conditional_modules: list[str]
    """Classes of modules that a rank may not use; DDP then looks for unused parameters after each forward."""
    requires_gradient_sync: Timing
    """`last_micro_batch` is DDP's `no_sync` on all others."""
    bucket_cap_mb: float = Field(gt=0)
    """MiB of gradient in one all-reduce; the first bucket has 1 MiB."""
    find_unused_parameters: bool
    """Look for parameters without a gradient after each forward; without it DDP refuses them."""
    static_graph: bool
    """The set of used parameters never changes."""
    gradient_as_bucket_view: bool
    """Gradients live in the buckets, which saves a copy of them."""
    forward_sync_buffers: bool
    """Broadcast rank 0's buffers before each forward."""
    zero_redundancy_optimizer: bool
    """`torch.distributed.optim.ZeroRedundancyOptimizer`: whole parameters stay on each rank, each rank steps its part of them."""


Options = FullyShard | Replicate | DistributedDataParallel

FORMS: Mapping[str, type[Options]] = {
    "fully_shard": FullyShard,
    "replicate": Replicate,
    "DistributedDataParallel": DistributedDataParallel,
}
"""The native config of each form, by `data_parallel`."""

CONSTANTS: Mapping[str, tuple[Any, str]] = {
    "mp_policy.cast_forward_inputs": (True, "inputs of a unit must have its parameters' format; torch's default, written out"),
    "mp_policy.output_dtype": (None, "outputs stay in the compute format, as in the other engines"),
    "reduce_scatter_unused_params": (False, "a parameter that no rank used is not updated, as in plain torch"),
    "find_unused_parameters": (False, "DDP then refuses unused parameters; looking for them costs a walk of the graph each step"),
    "static_graph": (False, "the set of used parameters may change"),
    "gradient_as_bucket_view": (True, "same maths, and one copy of the gradients less"),
    "forward_sync_buffers": (False, "buffers are broadcast once before training; FSDP2 and DeepSpeed never do it in forward either"),
    "zero_redundancy_optimizer": (False, "shard_optimizer means fully_shard unless native.fsdp.zero_redundancy_optimizer is true"),
}
"""Dotted keys that are written whatever the config says, in the forms that have them: `(value, why)`."""

_PARSER: TypeAdapter[Options] = TypeAdapter(Annotated[Options, Field(discriminator="data_parallel")], config=ConfigDict(defer_build=True))


def constants_of(form: str) -> Native:
    """The constants that a form has, nested."""
    native: Native = {}
    for key, (value, _) in CONSTANTS.items():
        section, _, leaf = key.rpartition(".")
        if (section or leaf) in FORMS[form].model_fields:
            (native.setdefault(section, {}) if section else native)[leaf] = value
    return native


def parse(native: Native) -> Options:
    """A native config as an object.

    Raises:
        pydantic.ValidationError: It is none; `native.check` has told the user so before.
    """
    return _PARSER.validate_python(native)
