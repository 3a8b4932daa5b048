"""The arguments that switch an engine on."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config
from unishard.config.nested import Native

__all__ = ["DEEPSPEED", "FSDP", "SWITCHES", "switched_on", "without"]

FSDP = "fsdp"
"""The argument for FSDP."""
DEEPSPEED = "deepspeed"
"""The argument for DeepSpeed, which holds its config."""

SWITCHES: Mapping[str, Native] = {FSDP: {FSDP: True, "fsdp_config": {"version": 2}}}
"""What switches a backend on, apart from its config. The others are on where their config is there, and it keeps fp32 masters."""


def switched_on(cfg: Config) -> bool:
    """Whether a config needs such a switch."""
    return cfg.backend in SWITCHES and cfg.sharding.strategy != "no_shard"


def without(cfg: Config) -> bool:
    """Whether a config is run by neither engine, but by DistributedDataParallel."""
    return cfg.backend in SWITCHES and cfg.sharding.strategy == "no_shard"
