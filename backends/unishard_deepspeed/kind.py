"""Which of DeepSpeed's optimizers runs a config."""

from __future__ import annotations

from typing import Literal

from unishard.config import Config
from unishard_deepspeed import fields

Kind = Literal["stage-0", "bf16-stage-1", "stages-1-2", "stage-3"]


def kind_of(cfg: Config) -> Kind:
    """Determine the kind from the config, not from attributes of the optimizer, which may be renamed."""
    if fields.stage(cfg) == 0:
        return "stage-0"
    if fields.stage(cfg) == 3:
        return "stage-3"
    return "bf16-stage-1" if fields.bf16_optimizer(cfg) else "stages-1-2"
