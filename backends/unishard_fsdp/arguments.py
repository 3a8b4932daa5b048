"""Reads FSDP's own arguments into the config's words and writes them back. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.mapping.entries import Entry, interpret
from unishard.mapping.express import Expressed, FieldResult, express
from unishard.mapping.rules import Fit
from unishard_fsdp.expressions import EXPRESSIONS
from unishard_fsdp.keys import KEYS

__all__ = ["arguments", "parse"]

_TOOL = "FSDP of torch 2.13"
_VERSION_1 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")


def parse(native: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None) -> list[Entry]:
    """What the arguments say, one entry for each, and what FSDP assumes where they are silent.

    Args:
        native: Nested mappings, such as `{"version": 2, "reshard_after_forward": False}`.
        defaults: What a tool around FSDP assumes, by dotted key; counts more than FSDP's own.
        topology: The ranks, where they are known.
    """
    assumed = _assumed(native, dict(defaults or {}))
    return interpret(KEYS, native, tool=_TOOL, defaults=assumed, topology=topology)


def arguments(cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> Expressed:
    """The arguments of FSDP2 for a config, and what became of each of its fields."""
    expressed = express(EXPRESSIONS, cfg, topology, undecided)
    if not cfg.sharding.hybrid or topology.world_size > 1:
        return expressed
    # One rank is what is said of a number that nobody knows, and a mesh needs it.
    word = FieldResult(
        Fit.NEEDS_INPUT, "mesh", "the number of groups comes from the number of ranks; give --world-size and --gpus-per-node"
    )
    return expressed._replace(fields={**expressed.fields, "sharding.strategy": word, "sharding.group_size": word})


def _assumed(native: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What decides the strategy and the format of reductions where the arguments do not say it."""
    version = native.get("version", defaults.get("version"))
    if version is None:
        version = 1 if any(key in native for key in _VERSION_1) else 2
    assumed: dict[str, Any] = {"version": version}
    if str(version) == "2":
        assumed["reshard_after_forward"] = True
        defaults.pop("sharding_strategy", None)
    elif "reshard_after_forward" not in native:
        assumed["sharding_strategy"] = "FULL_SHARD"
        defaults.pop("reshard_after_forward", None)
    else:
        defaults.pop("sharding_strategy", None)
    formats = native.get("mixed_precision")
    if isinstance(formats, Mapping) and formats.get("param_dtype") is not None:
        assumed["mixed_precision.reduce_dtype"] = formats["param_dtype"]
    return assumed | defaults
