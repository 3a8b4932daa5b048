"""From a config to one engine's own config, checked against the number of ranks. Imports no engine and no torch."""

from __future__ import annotations

from unishard import registry
from unishard.config import Config
from unishard.errors import ConfigError, Problem
from unishard.rules import Translation
from unishard.topology import Topology

__all__ = ["check_batch", "translate"]


def translate(cfg: Config, *, backend: str | None = None, topology: Topology | None = None) -> Translation:
    """Translate a config into an engine's own.

    Args:
        cfg: What to run.
        backend: The engine; left out, `cfg.backend`.
        topology: The ranks; left out, one.

    Returns:
        The native config and the report, one line for each field. Fields that are not supported stand in the report;
        `Translation.check` turns them into an error.

    Raises:
        BackendError: There is no such backend.
        ConfigError: The batch sizes contradict each other, or `native` holds a key that the backend refuses.
    """
    topology = topology or Topology()
    check_batch(cfg, topology.world_size)
    return registry.get(backend or cfg.backend).translate(cfg, topology)


def check_batch(cfg: Config, world_size: int) -> int:
    """The global batch size on this number of ranks.

    Raises:
        ConfigError: The config states another one.
    """
    training = cfg.training
    product = training.micro_batch_size * training.gradient_accumulation_steps * world_size
    if training.global_batch_size not in (None, product):
        raise ConfigError(
            [
                Problem(
                    "training.global_batch_size",
                    f"is {training.global_batch_size}, but micro_batch_size {training.micro_batch_size} x gradient_accumulation_steps "
                    f"{training.gradient_accumulation_steps} x {world_size} ranks is {product}; write {product} or leave it out",
                )
            ]
        )
    return product
