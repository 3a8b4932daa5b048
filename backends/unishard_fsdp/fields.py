"""What the fields of a config are in the arguments of PyTorch's data parallelism. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology

Form = Literal["fully_shard", "replicate", "DistributedDataParallel"]

DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of the config's dtypes."""

_EVERY, _LAST = "every_micro_batch", "last_micro_batch"


def form_of(cfg: Config) -> Form:
    """Which of PyTorch's three forms of data parallelism runs a config."""
    if cfg.sharding.strategy == "no_shard":
        return "replicate" if cfg.precision.compute != "fp32" or cfg.parallel.slices else "DistributedDataParallel"
    return "fully_shard"


def has_strategy(*names: str) -> Callable[[Config], bool]:
    """Whether the strategy is one of these."""
    return lambda cfg: cfg.sharding.strategy in names


def is_form(*forms: Form) -> Callable[[Config], bool]:
    """Whether the form is one of these."""
    return lambda cfg: form_of(cfg) in forms


def for_forms(forms: tuple[Form, ...], setting: Callable[[Config], Native]) -> Callable[[Config, Topology], Native]:
    """A setting that only these forms have."""
    return lambda cfg, topology: setting(cfg) if form_of(cfg) in forms else {}


def may_wait(cfg: Config) -> bool:
    """Whether the strategy leaves gradients unreduced until the last micro-batch."""
    return cfg.sharding.strategy in ("no_shard", "shard_optimizer")


def waits(cfg: Config) -> bool:
    """The same, if FSDP2 then accumulates in the right dtype: it accumulates in the reduce dtype (torch 2.13)."""
    return may_wait(cfg) and cfg.precision.reduce == cfg.precision.accumulate


def timing(cfg: Config, topology: Topology) -> Native:
    """The form, and in which backward gradients are reduced."""
    form = form_of(cfg)
    deferred = waits(cfg) and not (form == "DistributedDataParallel" and cfg.sharding.conditional_modules)
    native: Native = {"data_parallel": form, "requires_gradient_sync": _LAST if deferred else _EVERY}
    if form != "DistributedDataParallel":
        native["reshard_after_backward"] = _EVERY if cfg.sharding.within_group == "full_shard" else _LAST
    if form == "fully_shard":
        # FSDP2 accumulates in the reduce dtype until gradients are reduced between groups.
        late = _LAST if cfg.precision.reduce == cfg.precision.accumulate else _EVERY
        native["requires_all_reduce"] = late if groups_of(cfg, topology) > 1 else None
    return native


def groups_of(cfg: Config, topology: Topology) -> int:
    """Number of groups that each hold a copy, for hybrid strategies."""
    return topology.world_size // shard_group_size(cfg, topology) if cfg.sharding.hybrid else 1


def mesh(cfg: Config, topology: Topology) -> Native:
    """The ranks of `fully_shard`, in one or two dimensions."""
    if form_of(cfg) != "fully_shard":
        return {}
    groups = groups_of(cfg, topology)
    return {"mesh": {"replicate": groups, "shard": shard_group_size(cfg, topology)} if groups > 1 else None}


def resharding(cfg: Config, topology: Topology) -> bool | int:
    """What `fully_shard` gets; a number that is not smaller than the group means all of it, and torch refuses a larger
    one.
    """
    if cfg.sharding.within_group != "full_shard":
        return False
    kept = cfg.sharding.reshard_group
    return cfg.sharding.reshard_after_forward if kept is None or kept < shard_group_size(cfg, topology) else True


def gathering(cfg: Config, topology: Topology) -> Native:
    """When units are resharded after forward. Backward gathers the last one next, so that prefetching means to keep it.

    With a smaller group, embeddings are gathered too: nothing else frees what they keep there (torch 2.13,
    `_fsdp_param.py`, `to_sharded`).
    """
    reshards = resharding(cfg, topology)
    return {
        "reshard_after_forward": reshards,
        "keep_last_unit": bool(reshards) and cfg.communication.prefetch_bucket_size != 0,
        "unshard_embeddings_in_backward": reshards is not True,
    }


def compute_dtypes(cfg: Config) -> Native:
    """The dtype of forward and backward."""
    return {"mp_policy": {"param_dtype": None if cfg.precision.compute == "fp32" else DTYPES[cfg.precision.compute]}}


def reduce_dtypes(cfg: Config) -> Native:
    """The dtype of reductions."""
    return {"mp_policy": {"reduce_dtype": DTYPES[cfg.precision.reduce]}}


def only_optimizer(cfg: Config) -> bool:
    """Whether only the optimizer is offloaded; not by FSDP2, which would gather parameters from the host."""
    offload = cfg.offload
    return offload.optimizer != "none" and offload.params == "none" and cfg.sharding.within_group == "full_shard"


def casts_inputs(cfg: Config) -> Native:
    """Whether the root casts its inputs."""
    return {"mp_policy": {"cast_forward_inputs": cfg.precision.cast_inputs is True}}


def offload(cfg: Config) -> Native:
    """Where parameters and optimizer state lie in host memory. Where only the state does not lie on the device, and in
    files, FSDP2 has nothing to do: its pieces come with those of the shards.
    """
    places = {cfg.offload.params, cfg.offload.optimizer}
    place = {"pin_memory": cfg.offload.pin_memory and cfg.offload.params != "nvme"} if places != {"none"} else None
    hosted = only_optimizer(cfg)
    copied = hosted and cfg.offload.optimizer == "cpu"
    return {"offload_policy": None if hosted else place, "host_optimizer": place if copied else None}


def prefetch(cfg: Config) -> Native:
    """How far ahead parameters are gathered."""
    if cfg.sharding.within_group != "full_shard":
        return {"prefetch_numel": None}
    size = cfg.communication.prefetch_bucket_size
    return {"prefetch_numel": "next_unit" if size is None else size}


MIXED: tuple[Form, ...] = ("fully_shard", "replicate")
