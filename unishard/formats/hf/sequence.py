"""`parallelism_config` of TrainingArguments: ranks that share sequences (transformers 5.23, accelerate 1.15.0).

It is an object, `ParallelismConfig(...)`, in a script; a file has its arguments as a mapping, which only scripts that
build the object take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit

NAME = "parallelism_config"
_AXES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_OTHERS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
_METHODS = {"cp_size": "allgather", "sp_size": "ulysses"}
_FIELDS = "parallel.sequence.size, parallel.sequence.method"


def sharing_of(value: Any) -> tuple[int, str] | None:
    """How many ranks share a sample, and how they attend; None where none do.

    Args:
        value: The arguments of `ParallelismConfig`, by name.

    Raises:
        Unreadable: They ask for what unishard does not have, or for nothing that Accelerate has.
    """
    if not isinstance(value, Mapping):
        raise Unreadable(f"must be a mapping of sizes, got {shown(value)}; write {{cp_size: 2, dp_shard_size: 2}}")
    if unknown := [name for name in value if name not in (*_AXES, *_OTHERS)]:
        raise Unreadable(f"must have no key {shown(unknown[0])}, which Accelerate 1.15.0 does not know; remove it")
    sizes = {name: 1 if value.get(name) is None else integer(1)(value[name]) for name in _AXES}
    if sizes["tp_size"] > 1:
        raise Unreadable("must have tp_size 1: tensor parallelism is not supported; train without it")
    on = [name for name in _METHODS if sizes[name] > 1]
    if len(on) > 1:
        raise Unreadable("must have only one of cp_size and sp_size above 1, as in Accelerate; set the other to 1")
    if sizes["dp_replicate_size"] > 1 and sizes["dp_shard_size"] > 1:
        raise Unreadable(
            "must have no groups of replicas here: set sharding.strategy to hybrid_shard and sharding.group_size"
        )
    return (sizes[on[0]], _METHODS[on[0]]) if on else None


def _read(value: Any, given: DocumentValues) -> KeyEffect:
    if value is None:
        return left_out("is off")
    sharing = sharing_of(value)
    if sharing is None:
        return left_out("all ranks share one copy, as without it")
    size, method = sharing
    ranks = given.topology.world_size if given.topology else 1
    total = size * integer(1)(value.get("dp_replicate_size") or 1) * integer(1)(value.get("dp_shard_size") or 1)
    if ranks > 1 and total != ranks:
        raise Unreadable(f"must multiply to the {ranks} ranks that there are, got {total}; set dp_shard_size")
    return KeyEffect(fields={"parallel.sequence.size": size, "parallel.sequence.method": method})


KEYS: Mapping[str, Key] = {NAME: Key(_read, _FIELDS, Fit.EXACT, "cp_size and sp_size")}
