"""Where the keys of torchtitan's older TOMLs stand today (torchtitan 0.2 has moved them between tables)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import Entry

__all__ = ["current_keys", "placed"]

_DEGREES = (
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
)
_MOVED: Mapping[str, str] = {
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{f"training.{name}": f"parallelism.{name}" for name in _DEGREES},
    **{
        f"experimental.{name}": f"parallelism.{name}"
        for name in (
            "pipeline_parallel_degree",
            "context_parallel_degree",
            "enable_async_tensor_parallel",
            "enable_compiled_autograd",
        )
    },
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "optimizer.fused": "optimizer.implementation",
}


def current_keys(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The document with its older keys at their new places, and the older key at each of these; a key that stands there
    already stays.
    """
    tables = {name: dict(value) if isinstance(value, Mapping) else value for name, value in data.items()}
    moved: dict[str, str] = {}
    for old, new in _MOVED.items():
        (table, key), (home, name) = old.split("."), new.split(".")
        source, target = tables.get(table), tables.setdefault(home, {}) if table in tables else None
        if not isinstance(source, dict) or not isinstance(target, dict) or key not in source or name in target:
            continue
        target[name] = source.pop(key)
        moved[new] = old
    return {name: value for name, value in tables.items() if value != {} or name in data}, moved


def placed(entry: Entry, moved: Mapping[str, str]) -> Entry:
    """The entry at the place where the file has its key."""
    old = moved.get(entry.key)
    if old is None:
        return entry
    table, _, key = old.partition(".")
    return entry._replace(path=(table, key), effect=entry.effect._replace(copy_verbatim=False, rejected_upstream=True))
