"""The arguments of Lightning's `FSDPStrategy` (2.6.6): those that are FSDP's own go through its backend, and come back
to where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import Native
from unishard.contract.entries import Entry, Key, KeyEffect, Unreadable
from unishard.contract.rules import Fit
from unishard.formats.engines.block import EngineBlock
from unishard.formats.lightning.built import built, short
from unishard.formats.lightning.rows import TIMEOUT, UNSET, left, off
from unishard.formats.lightning.strategy import Strategy
from unishard.formats.names import ignored

ToNative = Callable[[Any], Native]


def _defaults(*, fabric: bool) -> Mapping[str, Any]:
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
    policy = built(value)
    return {"cpu_offload": policy.arguments.get("offload_params", False) if policy and policy.key else value}


def _formats(value: Any) -> Native:
    config = built(value)
    formats = config.arguments if config and config.key else value
    if not isinstance(formats, Mapping):
        raise Unreadable(
            f"must be a MixedPrecision, got {shown(value)}; write class_path (torch.distributed.fsdp.MixedPrecision) "
            "and init_args",
            value,
        )
    known = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "cast_forward_inputs")
    quiet = ("keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore")
    if unknown := [name for name in formats if name not in known + quiet]:
        raise Unreadable(f"must be a MixedPrecision, which has no {unknown[0]!r}; write one of {', '.join(known)}")
    return {"mixed_precision": {name: item for name, item in formats.items() if name in known}}


def _wrapping(value: Any) -> Native:
    names = _classes(value)
    if names:
        return {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": names}
    instance = built(value)
    policy = short(instance.path) if instance else shown(value)
    if instance and policy == "size_based_auto_wrap_policy":
        return {
            "auto_wrap_policy": "SIZE_BASED_WRAP",
            "min_num_params": instance.arguments.get("min_num_params", 100_000_000),
        }
    raise Unreadable(f"must be module classes, got {policy}; write the classes of the model's blocks", policy)


def _recomputed(value: Any) -> Native:
    names = _classes(value)
    if not names:
        raise Unreadable(f"must be module classes, got {shown(value)}; write the classes to recompute", value)
    return {"activation_checkpointing": names}


def _classes(value: Any) -> list[str]:
    """Names of classes without their modules, from a class, a list of them, or a policy made of them; empty for
    anything else.
    """
    if isinstance(value, list | tuple | Set):
        return [short(item) for item in value] if all(isinstance(item, str) for item in value) else []
    instance = built(value)
    if instance is None:
        # YAML's set of names is a mapping to nothing.
        return _classes(list(value)) if isinstance(value, Mapping) and value and not any(value.values()) else []
    if short(instance.path) in ("ModuleWrapPolicy", "transformer_auto_wrap_policy"):
        return _classes(
            instance.arguments.get("module_classes") or instance.arguments.get("transformer_layer_cls") or []
        )
    return [short(instance.path)] if not instance.key and not instance.path.endswith(("policy", "fn")) else []


def _mesh(value: Any) -> Native:
    sizes = value if isinstance(value, list | tuple) else None
    if (
        sizes is None
        or len(sizes) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    ):
        raise Unreadable(f"must be [replicas, ranks in each], got {shown(value)}; write such as [2, 8]", value)
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
    "timeout": TIMEOUT,
}
"""The arguments that concern only Lightning, with those that no file can say."""


def entries_of(strategy: Strategy) -> Iterator[Entry]:
    """What the strategy and its arguments say."""
    arguments = {**strategy.stands_for, **strategy.arguments}
    block = EngineBlock("fsdp", strategy.base)
    for name in [name for name in arguments if name in ARGUMENTS]:
        try:
            fragment = ARGUMENTS[name](arguments[name])
        except Unreadable as error:
            yield strategy.of(name, KeyEffect(Fit.UNSUPPORTED, str(error)))
            continue
        if not fragment:
            yield strategy.of(name, UNSET)
        for key, value in fragment.items():
            block.add(key, value, *strategy.source_keys(name))
    block.source_keys["version"] = (strategy.named,)
    yield from strategy.entries(block, _defaults(fabric=strategy.fabric))
    yield from strategy.table(OWN, ARGUMENTS)


def own_formats(strategy: Strategy) -> str:
    """`mixed`, or `fp16` for one that computes in it, where FSDP has its own dtypes; empty otherwise."""
    own = strategy.arguments.get("mixed_precision")
    formats = built(own)
    param = str(formats.arguments.get("param_dtype")) if formats else ""
    return "" if not own else "fp16" if "16" in param and "bf" not in param else "mixed"
