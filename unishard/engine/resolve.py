"""Decide once what a config makes of a run. Nothing behind it reads the config."""

from __future__ import annotations

from unishard.config import Config, leaves, value_at
from unishard.contract.plan import ConfigText, ObserveSpec

__all__ = ["observe_spec", "text_of"]


def text_of(cfg: Config) -> ConfigText:
    """The config as plain data."""
    return ConfigText(
        fields={path: value_at(cfg, path) for path, _ in leaves(Config)},
        given=cfg.model_dump(exclude_unset=True),
        saved=cfg.model_dump(mode="json", exclude={"launch"}),
    )


def observe_spec(cfg: Config, text: ConfigText) -> ObserveSpec:
    """What is measured, traced and written."""
    return ObserveSpec(cfg.logging, cfg.profile, cfg.scheduler.total_steps, cfg.precision.compute, text)
