"""Where the keys of torchtitan's older TOMLs stand today (torchtitan 0.2 has moved them between tables)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from unishard.contract.entries import Entry, Key, KeyEffect
from unishard.contract.key_rows import drops
from unishard.contract.rules import Fit
from unishard.formats.torchtitan.keys import KEYS

__all__ = ["current_keys", "of_a_fork", "own_of", "placed"]

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


_TABLES = frozenset(key.partition(".")[0] for key in KEYS)
_FORK = (
    "not a key of torchtitan 0.2: only a fork that adds it reads it; what it does to the training is not carried over"
)
_ROW = drops("not a table of JobConfig: only the module that adds it reads it", unknown=True)


def own_of(data: Mapping[str, Any]) -> Mapping[str, Key]:
    """Rows for unknown tables, except those that only misspell a known one."""
    strange = [
        name
        for name, value in data.items()
        if isinstance(value, Mapping) and value and name not in _TABLES and "." not in name
    ]
    return {name: _ROW for name in strange if not get_close_matches(name, _TABLES, 1, 0.75)}


def of_a_fork(entry: Entry, known: Iterable[str]) -> Entry:
    """The entry; an unknown key in a table of JobConfig is reported unless it misspells a known one: a fork reads
    it.
    """
    refused = (
        entry.effect.fit is Fit.UNSUPPORTED
        and entry.effect.unknown
        and len(entry.path) > 1
        and entry.path[0] in _TABLES
    )
    if not refused or "did you mean" in entry.effect.note or get_close_matches(entry.key, known, 1, 0.9):
        return entry
    return entry._replace(effect=KeyEffect(Fit.APPROXIMATE, _FORK, unknown=True, copy_verbatim=True, notable=True))
