"""Translate a config to an engine's native config, checked against the topology.

Imports neither torch nor an engine.
"""

from __future__ import annotations

from unishard.config import Config, expect_config
from unishard.config.batch_sizes import check_batch
from unishard.config.data_share import data_share_of
from unishard.config.shard_groups import check_groups
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.report import Translation
from unishard.errors import BackendError, ConfigError, Problem


def translate(cfg: Config, *, backend: str | None = None, topology: Topology | None = None) -> Translation:
    """Translate a config to an engine's native config.

    Args:
        cfg: What to run.
        backend: The engine; by default `cfg.backend`.
        topology: The ranks; by default one.

    Returns:
        The native config and the report, one line for each field. Unsupported fields are listed in the report;
        `Translation.check` turns them into an error.

    Raises:
        BackendError: There is no backend with that name.
        ConfigError: The config's backend is not installed, its batch sizes contradict each other, its groups do not fit
            the ranks, or the backend rejects a key of `native`.
    """
    expect_config(cfg)
    topology = topology or Topology()
    require_installed(cfg)
    check_batch(cfg.training, data_share_of(cfg, topology).of)
    check_groups(cfg, topology)
    return registry.get(backend or cfg.backend).translate(cfg, topology)


def require_installed(cfg: Config) -> None:
    """Check that every backend that a config names is installed.

    Raises:
        ConfigError: One is not; names those that are.
    """
    named = [("backend", cfg.backend), *((f"native.{name}", name) for name in cfg.native)]
    problems = [problem for path, name in named if (problem := _unknown(path, name))]
    if problems:
        raise ConfigError(problems)


def _unknown(path: str, name: str) -> Problem | None:
    try:
        registry.get(name)
    except BackendError as error:
        return Problem(path, str(error))
    return None
