"""The arguments of Lightning's `DDPStrategy` and `ModelParallelStrategy` (2.6.6), one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import broadcast_buffers, drops, integer, number
from unishard.contract.rules import Fit
from unishard.formats.lightning.keys import HYDRA, left, off, optional
from unishard.formats.lightning.shape import built, named, short
from unishard.formats.names import each, ignored

_LAUNCH = "the launcher decides it"
_BYTES = 4
_CHECKS = ("device_ids", "output_device", "dim", "check_reduction", "init_sync")


def _bucket(value: Any, given: DocumentValues) -> KeyEffect:
    elements = int(number(0)(value) * 2**20) // _BYTES
    return KeyEffect(fields={"communication.reduce_bucket_size": max(elements, 1)})


DDP: Mapping[str, Key] = {
    **ignored("lightning/ignored_ddp.txt", left, off),
    **HYDRA,
    **each("broadcast_buffers forward_sync_buffers", optional(broadcast_buffers, "training.buffers", Fit.EQUIVALENT)),
    "bucket_cap_mb": optional(_bucket, "communication.reduce_bucket_size"),
}
"""The arguments of `DDPStrategy`, and those that it hands on to DistributedDataParallel."""

_WRITTEN = "configure_model calls fully_shard there; here every block is a unit"
_TENSOR = "tensor parallelism is not supported; write tensor_parallel_size: 1"


def _tensor(value: Any, given: DocumentValues) -> KeyEffect:
    if value in ("auto", None) and given.topology is not None and given.topology.local_world_size == 1:
        return left_out("one device a node, so nothing is cut")
    if value in ("auto", None) or integer(1)(value) > 1:
        return KeyEffect(Fit.UNSUPPORTED, _TENSOR)
    return left_out("nothing is cut")


def _data(value: Any, given: DocumentValues) -> KeyEffect:
    if value not in ("auto", None):
        integer(1)(value)
    return KeyEffect(Fit.APPROXIMATE, _WRITTEN, {"sharding.strategy": "full_shard"})


MODEL_PARALLEL: Mapping[str, Key] = {
    "data_parallel_size": Key(_data, "sharding.strategy", Fit.APPROXIMATE, _WRITTEN, tool_default="auto"),
    "tensor_parallel_size": Key(_tensor, "", Fit.UNSUPPORTED, _TENSOR, tool_default="auto"),
    "save_distributed_checkpoint": left("affects only the files of checkpoints"),
    "parallelize_fn": left(_WRITTEN),
    **each("process_group_backend timeout", left(_LAUNCH)),
    **HYDRA,
}
"""The arguments of `ModelParallelStrategy`, Lightning's FSDP2. Fabric's keeps the optimizer on the old parameters where
model and optimizer are set up together, so that a step moves nothing, and leaves gradients unreduced after
`no_backward_sync(enabled=False)` (2.6.6)."""

ToNative = Callable[[Any], Native]


def defaults(*, fabric: bool) -> Mapping[str, Any]:
    """What the strategy assumes: FSDP1, the whole model as one unit, and another kind of checkpoint in Fabric."""
    return {
        "version": 1,
        "sharding_strategy": "FULL_SHARD",
        "auto_wrap_policy": "NO_WRAP",
        "state_dict_type": "sharded" if fabric else "full",
    }


def _as(name: str) -> ToNative:
    return lambda value: {name: value}


def _word(name: str) -> ToNative:
    """An enum by its name, also with that of its class before it."""
    return lambda value: {name: short(value) if isinstance(value, str) else value}


def _offload(value: Any) -> Native:
    found = built(value)
    return {"cpu_offload": found.arguments.get("offload_params", False) if found and found.key else value}


def _formats(value: Any) -> Native:
    found = built(value)
    formats = found.arguments if found and found.key else value
    if not isinstance(formats, Mapping):
        raise Unreadable(
            f"must be a MixedPrecision, got {shown(value)}; write class_path (torch.distributed.fsdp.MixedPrecision) "
            "and init_args"
        )
    formats = {name: short(found) if (found := named(item)) != item else item for name, item in formats.items()}
    known = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs")
    quiet = ("keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore")
    if unknown := [name for name in formats if name not in known + quiet]:
        raise Unreadable(f"must be a MixedPrecision, which has no {unknown[0]!r}; write one of {', '.join(known)}")
    return {"mixed_precision": {name: item for name, item in formats.items() if name in known}}


def _wrapping(value: Any) -> Native:
    names = _classes(value)
    if names:
        return {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": names}
    found = built(value)
    policy = short(found.path) if found else shown(value)
    if found and policy == "size_based_auto_wrap_policy":
        return {
            "auto_wrap_policy": "SIZE_BASED_WRAP",
            "min_num_params": found.arguments.get("min_num_params", 100_000_000),
        }
    raise Unreadable(f"must be module classes, got {policy}; write the classes of the model's blocks")


def _recomputed(value: Any) -> Native:
    names = _classes(value)
    if not names:
        raise Unreadable(f"must be module classes, got {shown(value)}; write the classes to recompute")
    return {"activation_checkpointing": names}


def _classes(value: Any) -> list[str]:
    """Names of classes without their modules, from a class, a list of them, or a policy made of them; empty for
    anything else.
    """
    if isinstance(value, list | tuple | Set):
        return (
            [short(item) for item in map(named, value) if isinstance(item, str)]
            if all(isinstance(named(item), str) for item in value)
            else []
        )
    found = built(value)
    if found is None:
        # YAML's set of names is a mapping to nothing.
        return _classes(list(value)) if isinstance(value, Mapping) and value and not any(value.values()) else []
    if short(found.path) in ("ModuleWrapPolicy", "transformer_auto_wrap_policy"):
        return _classes(found.arguments.get("module_classes") or found.arguments.get("transformer_layer_cls") or [])
    return [short(found.path)] if not found.key and not found.path.endswith(("policy", "fn")) else []


def _mesh(value: Any) -> Native:
    sizes = value if isinstance(value, list | tuple) else None
    if (
        sizes is None
        or len(sizes) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    ):
        raise Unreadable(f"must be [replicas, ranks in each], got {shown(value)}; write such as [2, 8]")
    return {"mesh": {"replicate": sizes[0], "shard": sizes[1]}}


def _unless_off(convert: ToNative) -> ToNative:
    return lambda value: {} if off(value) else convert(value)


ARGUMENTS: Mapping[str, ToNative] = {
    "sharding_strategy": _word("sharding_strategy"),
    "cpu_offload": _offload,
    "mixed_precision": _unless_off(_formats),
    "auto_wrap_policy": _unless_off(_wrapping),
    "activation_checkpointing": _unless_off(_recomputed),
    "activation_checkpointing_policy": _unless_off(_recomputed),
    "device_mesh": _unless_off(_mesh),
    "state_dict_type": _as("state_dict_type"),
    "backward_prefetch": _word("backward_prefetch"),
    "forward_prefetch": _as("forward_prefetch"),
    "limit_all_gathers": _as("limit_all_gathers"),
    "sync_module_states": _as("sync_module_states"),
    "use_orig_params": _as("use_orig_params"),
    "ignored_modules": _as("ignored_modules"),
    "ignored_states": _as("ignored_modules"),
}
"""The arguments that FSDP itself has, and how the backend that knows FSDP calls them."""


OWN: Mapping[str, Key] = {
    **ignored("lightning/ignored_fsdp.txt", left, off),
    **HYDRA,
    "timeout": drops("how long a collective may hang; see communication.desync_timeout"),
}
"""The arguments that concern only Lightning, with those that no file can say."""
