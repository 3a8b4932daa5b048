"""Which of DeepSpeed's optimizers runs a config."""

from __future__ import annotations

from typing import Literal

from unishard.config import Config
from unishard_deepspeed import fields

Kind = Literal["stage-0", "stages-1-2", "stage-3"]


def kind_of(cfg: Config) -> Kind:
    """Determine the kind from the config, not from attributes of the optimizer, which may be renamed."""
    kinds: tuple[Kind, ...] = ("stage-0", "stages-1-2", "stages-1-2", "stage-3")
    return kinds[fields.stage(cfg)]
