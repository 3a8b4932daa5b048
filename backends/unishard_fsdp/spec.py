"""What torch's data parallelism is built from."""

from __future__ import annotations

from dataclasses import dataclass

from unishard.config import Config
from unishard.config.nested import Native
from unishard.contract.model_shape import ModelShape
from unishard.contract.report import Translation
from unishard_fsdp.options import Options, parse


@dataclass(frozen=True, slots=True)
class FSDPSpec:
    """An `EngineSpec`."""

    engine: str
    native: Native
    options: Options
    """The same, checked."""
    strategy: str
    """`sharding.strategy`, for messages."""
    steps_always: bool
    """Whether an update with a gradient that is not finite is made, too."""


def spec_of(cfg: Config, translation: Translation, shape: ModelShape) -> FSDPSpec:
    """The spec of a config for a model, with the names of what is not sharded in place of patterns."""
    native = dict(translation.native)
    if native.get("ignored_params"):
        native["ignored_params"] = [parameter.name for parameter in shape.replicated]
    return FSDPSpec(
        engine=translation.engine,
        native=native,
        options=parse(native),
        strategy=cfg.sharding.strategy,
        steps_always=cfg.training.nonfinite == "ignore",
    )
