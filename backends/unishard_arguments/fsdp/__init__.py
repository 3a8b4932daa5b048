"""Translate FSDP's own arguments to config fields and back. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, interpret
from unishard.contract.render import FieldResult, RenderedDocument, render
from unishard.contract.rules import Fit
from unishard_arguments.fsdp.keys import KEYS
from unishard_arguments.fsdp.rules import RULES

__all__ = ["ARGUMENTS"]

_TOOL = "FSDP of torch 2.13"
_VERSION_1 = ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states")


class FSDPArguments:
    """The arguments of FSDP1's constructor and of `fully_shard`; only the latter are written."""

    keys = KEYS
    rules = RULES

    def read(
        self, native: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None
    ) -> list[Entry]:
        """What each argument says, such as those of `{"version": 2, "reshard_after_forward": False}`."""
        assumed = _assumed(native, dict(defaults or {}))
        return interpret(KEYS, native, tool=_TOOL, defaults=assumed, topology=topology)

    def write(self, cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> RenderedDocument:
        """The arguments of FSDP2, and the result for each field."""
        expressed = render(RULES, cfg, topology, undecided)
        if not cfg.sharding.hybrid or topology.world_size > 1:
            return expressed
        # A topology of one rank means that the number of ranks is unknown, but a mesh needs it.
        note = "depends on the number of ranks; add --world-size and --gpus-per-node"
        result = FieldResult(Fit.NEEDS_INPUT, "mesh", note)
        return expressed._replace(
            fields={**expressed.fields, "sharding.strategy": result, "sharding.group_size": result}
        )


ARGUMENTS = FSDPArguments()


def _assumed(native: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The defaults that decide the strategy and the reduce dtype if the arguments do not."""
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
    dtypes = native.get("mixed_precision")
    if isinstance(dtypes, Mapping) and dtypes.get("param_dtype") is not None:
        assumed["mixed_precision.reduce_dtype"] = None
    return assumed | defaults
