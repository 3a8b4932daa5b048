"""What Accelerate's plugin for FSDP holds."""

from __future__ import annotations

from typing import Any

from unishard.formats.verify.settings import KEPT, kept_after_forward

_OLD = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": KEPT,
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": f"hybrid_{KEPT}",
    "HYBRID_SHARD_ZERO2": f"hybrid_{KEPT}",
}


def settings_of(plugin: Any, *, replicated: bool = False) -> dict[str, Any]:
    """The settings of a `FullyShardedDataParallelPlugin`.

    Args:
        plugin: The plugin.
        replicated: Whether a mesh of two axes makes groups of ranks.
    """
    if plugin.fsdp_version == 2:
        strategy = kept_after_forward(
            "hybrid_shard" if replicated else "full_shard", reshards=bool(plugin.reshard_after_forward)
        )
    else:
        strategy = _OLD.get(getattr(plugin.sharding_strategy, "name", ""), str(plugin.sharding_strategy))
    offload = plugin.cpu_offload
    on_host = (
        offload is True or getattr(offload, "offload_params", False) or type(offload).__name__ == "CPUOffloadPolicy"
    )
    place = "cpu" if on_host else "none"
    return {
        "sharding.strategy": strategy,
        "sharding.units": _units(plugin),
        "offload.params": place,
        "offload.optimizer": place,
        "activation_checkpointing": "full" if plugin.activation_checkpointing else "none",
    }


def _units(plugin: Any) -> Any:
    policy = getattr(plugin.auto_wrap_policy, "__name__", "")
    if "transformer" in policy:
        names = plugin.transformer_cls_names_to_wrap
        return sorted(names) if names else "auto"
    if "size" in policy:
        return "auto"
    return "none"
