"""The part of a training YAML that speaks of the engine: `fsdp_config`, or DeepSpeed's config in older files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Path
from unishard.contract.rules import Fit
from unishard.formats.composer.fsdp_keys import ARGUMENTS
from unishard.formats.engine_block import EngineBlock, Spot, combined

__all__ = ["DEEPSPEED", "engine", "trains"]

DEEPSPEED = ("deepspeed_config", "deepspeed")
"""Keys that hold DeepSpeed's own config, which Composer read until 0.28."""
_FSDP: Path = ("fsdp_config",)


def engine(shaped: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """What the engine's own table makes of its part of the file."""
    deepspeed = next((key for key in DEEPSPEED if isinstance(shaped.get(key), Mapping)), None)
    for key in DEEPSPEED:
        if key in shaped and key != deepspeed:
            yield Entry((key,), shaped[key], KeyEffect(Fit.IGNORED, "is off"))
    if deepspeed is None:
        yield from _fsdp(shaped, topology)
        return
    yield Entry((deepspeed,), "deepspeed", KeyEffect(fields={"backend": "deepspeed"}), assumed=True)
    yield from EngineBlock("deepspeed", (deepspeed,), native=shaped[deepspeed]).entries(topology=topology)
    if "fsdp_config" in shaped:
        sharded = shaped["fsdp_config"]
        keys = [key for key in sharded if key in ARGUMENTS] if isinstance(sharded, Mapping) else []
        refused = KeyEffect(Fit.UNSUPPORTED, f"contradicts {deepspeed}; keep one of the two")
        yield from (Entry(("fsdp_config", key), sharded[key], refused) for key in keys)
        if not isinstance(sharded, Mapping) or not sharded:
            yield Entry(_FSDP, sharded, KeyEffect(Fit.IGNORED, "is off") if not sharded else refused)


def _fsdp(shaped: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    sharded = shaped.get("fsdp_config")
    if sharded in (None, False):
        if trains(shaped):
            note = "without fsdp_config Composer runs DistributedDataParallel"
            fields = {"backend": "fsdp", "sharding.strategy": "no_shard"}
            yield Entry(_FSDP, sharded, KeyEffect(Fit.EXACT, note, fields), assumed="fsdp_config" not in shaped)
        elif "fsdp_config" in shaped:
            yield Entry(_FSDP, sharded, KeyEffect(Fit.IGNORED, "is off"))
    elif not isinstance(sharded, Mapping):
        yield Entry(
            _FSDP,
            sharded,
            KeyEffect(Fit.UNSUPPORTED, f"must be a mapping, got {shown(sharded)}; write its keys below it"),
        )
    elif not sharded:
        yield Entry(_FSDP, sharded, KeyEffect(Fit.EXACT, "", {"backend": "fsdp", "sharding.strategy": "full_shard"}))
    else:
        yield from _arguments(sharded, topology)


def _arguments(sharded: Mapping[str, Any], topology: Topology | None) -> Iterator[Entry]:
    """FSDP's own arguments, each at its place below `fsdp_config`."""
    names = {own: key for key, own in ARGUMENTS.items() if key in sharded}
    block = EngineBlock("fsdp", _FSDP, {"version": ()})
    for key, value in sharded.items():
        spot = Spot((*_FSDP, key), value)
        if key in ARGUMENTS and names[ARGUMENTS[key]] == key:
            block.add(ARGUMENTS[key], value, spot)
        elif key in ARGUMENTS:
            yield combined(spot, [KeyEffect(Fit.IGNORED, f"{names[ARGUMENTS[key]]} says it as well, and counts")])
    version = 2 if "reshard_after_forward" in block.native and "sharding_strategy" not in block.native else 1
    yield from block.entries(defaults={"version": version}, topology=topology)


def trains(shaped: Mapping[str, Any]) -> bool:
    """Whether the file is for training, and not for evaluation or a benchmark."""
    return any(key in shaped for key in ("optimizer", "max_duration", "global_train_batch_size", "train_loader"))
