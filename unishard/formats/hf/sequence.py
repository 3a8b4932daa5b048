"""`parallelism_config` of TrainingArguments: ranks that share sequences or layers (transformers 5.23, accelerate
1.15.0).

It is an object, `ParallelismConfig(...)`, in a script; a file has its arguments as a mapping, which only scripts that
build the object take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.contract.entries import DocumentValues, Key, KeyEffect, Unreadable, left_out
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit

NAME = "parallelism_config"
NO_EXPERTS = "which Accelerate 1.15.0 does not know; write parallel.expert, with which each rank keeps its own batch"
_AXES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_OTHERS = ("cp_backend", "sp_backend", "tp_handler", "cp_handler", "sp_handler")
_METHODS = {"cp_size": "allgather", "sp_size": "ulysses"}
_FIELDS = ("parallel.sequence.size", "parallel.sequence.method", "parallel.tensor.size")


def sharing_of(value: Any, ranks: int | None) -> Mapping[str, Any]:
    """The fields of the config that a `ParallelismConfig` says; none where ranks share nothing.

    Args:
        value: Its arguments, by name.
        ranks: How many there are, if that is known.

    Raises:
        Unreadable: They ask for what unishard does not have, or for nothing that Accelerate has.
    """
    if not isinstance(value, Mapping):
        raise Unreadable(
            f"must be a mapping of sizes, got {shown(value)}; write {{cp_size: 2, dp_shard_size: 2}}", value
        )
    if "ep_size" in value:
        raise Unreadable(f"must have no key 'ep_size', {NO_EXPERTS}")
    if unknown := [name for name in value if name not in (*_AXES, *_OTHERS)]:
        raise Unreadable(f"must have no key {shown(unknown[0])}, which Accelerate 1.15.0 does not know; remove it")
    sizes = {name: 1 if value.get(name) is None else integer(1)(value[name]) for name in _AXES}
    on = [name for name in _METHODS if sizes[name] > 1]
    if len(on) > 1:
        raise Unreadable("must have only one of cp_size and sp_size above 1, as in Accelerate; set the other to 1")
    if sizes["dp_replicate_size"] > 1 and sizes["dp_shard_size"] > 1:
        raise Unreadable(
            "must have no groups of replicas here: set sharding.strategy to hybrid_shard and sharding.group_size"
        )
    cut = {"parallel.tensor.size": sizes["tp_size"]} if sizes["tp_size"] > 1 else {}
    if not on:
        return cut
    if ranks is not None and math.prod(sizes.values()) != ranks:
        raise Unreadable(
            f"must multiply to the {ranks} ranks that there are, got {math.prod(sizes.values())}; set dp_shard_size"
        )
    return cut | {"parallel.sequence.size": sizes[on[0]], "parallel.sequence.method": _METHODS[on[0]]}


def _read(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None:
        return left_out("is off")
    fields = sharing_of(value, document.topology.world_size if document.topology else None)
    return KeyEffect(fields=fields) if fields else left_out("all ranks share one copy, as without it")


KEYS: Mapping[str, Key] = {NAME: Key(_read, _FIELDS, Fit.EXACT, "cp_size, sp_size and tp_size")}
