"""What torch's data parallelism is built from: the native config, arguments of `fully_shard` or DistributedDataParallel
as data. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from unishard.config.nested import Native

Timing = Literal["every_micro_batch", "last_micro_batch"]
DType = Literal["float32", "bfloat16", "float16"]


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class MixedPrecision(_Arguments):
    """`torch.distributed.fsdp.MixedPrecisionPolicy`, with dtypes by name."""

    param_dtype: DType | None
    """Dtype of the gathered parameters; null for their own."""
    reduce_dtype: DType | None
    """Dtype in which gradients are reduced; null for `param_dtype`."""
    output_dtype: DType | None
    """Dtype to which the root module's output is cast; null for no cast."""
    cast_forward_inputs: bool
    """Whether floating-point inputs of units and root are cast to `param_dtype`."""


class CPUOffload(_Arguments):
    """`torch.distributed.fsdp.CPUOffloadPolicy`."""

    pin_memory: bool
    """Pinned host memory, if there is a CUDA device; ignored without one, because torch 2.13 would raise."""


class HostOptimizer(_Arguments):
    """unishard's own: the torch optimizer steps host copies of the shards, with its state in host memory."""

    pin_memory: bool
    """Pinned copies, if there is a CUDA device."""


class Mesh(_Arguments):
    """A device mesh of two axes; consecutive ranks are neighbors on the axis `shard`."""

    replicate: int
    """Groups that each hold a full copy."""
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
    """Smaller modules are not units."""
    conditional_modules: list[str]
    """Classes of modules that a rank may skip; they belong to the unit around them."""
    ignored_params: list[str]
    """Patterns of the names of parameters that are not sharded, and for a model the names; unishard averages their
    gradients."""
    reshard_after_forward: bool | int
    """For units; a number leaves a shard of what was gathered on each of so many ranks. The root is never resharded
    after forward, because backward needs it first (torch's default)."""
    keep_last_unit: bool
    """The last unit is not resharded after forward either: backward needs it next."""
    unshard_embeddings_in_backward: bool
    """`set_unshard_in_backward` of units that are a `torch.nn.Embedding`: backward needs none of their weights."""
    reshard_after_backward: Timing
    """`set_reshard_after_backward`."""
    requires_gradient_sync: Timing
    """`set_requires_gradient_sync`."""
    requires_all_reduce: Timing | None
    """`set_requires_all_reduce`: when gradients are averaged over the axis `replicate`; null without that axis."""
    prefetch_numel: int | Literal["next_unit"] | None
    """Elements that `set_modules_to_forward_prefetch` and `_backward_prefetch` may gather ahead, or the next unit; null
    for torch's prefetch."""
    mp_policy: MixedPrecision
    offload_policy: CPUOffload | None
    host_optimizer: HostOptimizer | None
    """Set if only the optimizer is offloaded and parameters are gathered unit by unit; otherwise null."""
    separate_reduce_scatter_group: bool
    """`set_separate_reduce_scatter_group`: gradients are reduced in a process group of their own, so that NCCL runs
    these collectives beside all-gathers in backward. One communicator more on each rank. torch 2.13."""
    allocate_memory_from_process_group_for_comm: bool
    """`set_allocate_memory_from_process_group_for_comm`: buffers of collectives come from NCCL's allocator, which
    spares copies over NVLink and SHARP. CUDA only."""
    symm_mem_for_comm: bool
    """`set_symm_mem_for_comm`: buffers of all-gathers lie in NCCL's symmetric memory, over which it has faster kernels.
    CUDA only."""
    reduce_scatter_unused_params: bool
    """`set_reduce_scatter_unused_params`: zero gradients for parameters without one, needed when ranks use different
    parameters."""


class Replicate(_Arguments):
    """`fully_shard` on a mesh of (ranks, 1): full fp32 parameters on each rank with FSDP2's mixed precision."""

    data_parallel: Literal["replicate"]
    conditional_modules: list[str]
    """Classes of modules that a rank may skip."""
    reshard_after_backward: Timing
    """When the copy in `mp_policy.param_dtype` is freed."""
    requires_gradient_sync: Timing
    """`set_requires_gradient_sync`."""
    mp_policy: MixedPrecision
    reduce_scatter_unused_params: bool
    """`set_reduce_scatter_unused_params`: zero gradients for parameters without one, needed when ranks use different
    parameters."""


class DistributedDataParallel(_Arguments):
    """`torch.nn.parallel.DistributedDataParallel`."""

    data_parallel: Literal["DistributedDataParallel"]
    conditional_modules: list[str]
    """Classes of modules that a rank may skip; DDP then looks for unused parameters after each forward."""
    requires_gradient_sync: Timing
    """`last_micro_batch` uses DDP's `no_sync` on all other micro-batches."""
    bucket_cap_mb: float = Field(gt=0)
    """MiB of gradients per all-reduce; the first bucket has 1 MiB."""
    find_unused_parameters: bool
    """Look for parameters without a gradient after each forward; if false, DDP raises for them."""
    static_graph: bool
    """The set of used parameters never changes."""
    gradient_as_bucket_view: bool
    """Gradients are views of the buckets, which saves a copy."""
    forward_sync_buffers: bool
    """Broadcast rank 0's buffers before each forward."""


Options = FullyShard | Replicate | DistributedDataParallel

COLLECTIVE_SETTINGS = (
    "separate_reduce_scatter_group",
    "allocate_memory_from_process_group_for_comm",
    "symm_mem_for_comm",
)
"""Methods of FSDPModule, without `set_`, that not every torch or device has."""

FORMS: Mapping[str, type[Options]] = {
    "fully_shard": FullyShard,
    "replicate": Replicate,
    "DistributedDataParallel": DistributedDataParallel,
}
"""The native config class of each form, by `data_parallel`."""

CONSTANTS: Mapping[str, tuple[Any, str]] = {
    "mp_policy.output_dtype": (None, "outputs stay in the compute dtype, as in other engines"),
    "reduce_scatter_unused_params": (False, "a parameter that no rank used is not updated, as in plain torch"),
    "separate_reduce_scatter_group": (False, "one communicator fewer on each rank; torch's default"),
    "allocate_memory_from_process_group_for_comm": (False, "buffers from torch's allocator; torch's default"),
    "symm_mem_for_comm": (False, "buffers from torch's allocator; torch's default"),
    "find_unused_parameters": (
        False,
        "DDP then raises for unused parameters; finding them traverses the graph each step",
    ),
    "static_graph": (False, "the set of used parameters may change"),
    "gradient_as_bucket_view": (True, "same maths, and one copy of the gradients fewer"),
    "forward_sync_buffers": (False, "buffers are broadcast once before training, as with FSDP2 and DeepSpeed"),
}
"""Dotted keys that are always written, in the forms that have them: `(value, why)`."""


def constants_of(form: str) -> Native:
    """The constants of a form, nested."""
    native: Native = {}
    for key, (value, _) in CONSTANTS.items():
        section, _, leaf = key.rpartition(".")
        if (section or leaf) in FORMS[form].model_fields:
            (native.setdefault(section, {}) if section else native)[leaf] = value
    return native


def parse(native: Native) -> Options:
    """Parse a native config.

    Raises:
        pydantic.ValidationError: It is invalid; `native.check` reports this to the user earlier.
    """
    return _parser().validate_python(native)


@cache
def _parser() -> TypeAdapter[Options]:
    return TypeAdapter(Annotated[Options, Field(discriminator="data_parallel")])
