"""The arguments that switch an engine on."""

from __future__ import annotations

from unishard.config import Config
from unishard.config.nested import Native

__all__ = ["DEEPSPEED", "FSDP", "FSDP_ON", "switched_on", "without"]

FSDP = "fsdp"
"""The argument for FSDP."""
DEEPSPEED = "deepspeed"
"""The argument for DeepSpeed, which holds its config."""

FSDP_ON: Native = {FSDP: True, "fsdp_config": {"version": 2}}
"""What switches FSDP on. DeepSpeed is on where its config is there, and keeps fp32 master weights."""


def switched_on(cfg: Config) -> bool:
    """Whether a config needs FSDP."""
    return cfg.backend == "fsdp" and cfg.sharding.strategy != "no_shard"


def without(cfg: Config) -> bool:
    """Whether a config is run by neither engine, but by DistributedDataParallel."""
    return cfg.backend == "fsdp" and cfg.sharding.strategy == "no_shard"
