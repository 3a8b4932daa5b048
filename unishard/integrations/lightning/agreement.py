"""What Lightning's arguments and unishard's config both say: the same, or one error; and where the ranks begin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment

import unishard
from unishard.config import Config
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem
from unishard.failures import lifetime

__all__ = ["agree_on_precision", "begin", "config_of", "precision_of"]

_SHORT = {"fp32": "32", "bf16": "bf16", "fp16": "16"}


def config_of(cfg: Config | str | Path | Mapping[str, Any] | None) -> Config:
    """The config of a strategy, without what Lightning does itself.

    Raises:
        ConfigError: It cannot be loaded, or resumes by itself.
    """
    found = cfg if isinstance(cfg, Config) else unishard.load(cfg)
    if found.checkpoint.on_existing == "resume":
        what = "resume would not reach Lightning's loops; remove it, and pass ckpt_path to fit, or call fabric.load"
        raise ConfigError([Problem("checkpoint.on_existing", what)])
    return found


def precision_of(cfg: Config) -> str:
    """The word of Lightning for a config's precision."""
    compute, master = cfg.precision.compute, cfg.precision.master
    return f"{_SHORT[compute]}-{'true' if compute == master else 'mixed'}"


def agree_on_precision(cfg: Config, given: str) -> None:
    """Check that Lightning was given no precision or the config's.

    Raises:
        ConfigError: Another one.
    """
    if given not in ("32-true", precision_of(cfg)):
        short = {f"{value}-mixed": name for name, value in _SHORT.items()}.get(given)
        write = f" and write `precision: {short}` in the config" if short else ""
        what = f"is {precision_of(cfg)} in Lightning's words, but Lightning was given {given}; remove its argument"
        raise ConfigError([Problem("precision", what + write)])


def begin(strategy: Any, cfg: Config) -> None:
    """Start the process group of one of Lightning's strategies. Collective.

    Raises:
        ConfigError: Lightning and the launcher have another number of ranks, or another kind of device.
    """
    size = strategy.num_nodes * strategy.num_processes
    if isinstance(strategy.cluster_environment, LightningEnvironment):  # which tells its processes only a part
        rank = strategy.node_rank * strategy.num_processes + strategy.local_rank
        own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": strategy.local_rank}
        for name, value in (own | {"LOCAL_WORLD_SIZE": strategy.num_processes}).items():
            os.environ.setdefault(name, str(value))
    topology = Topology.from_environment()
    if topology.world_size != size:
        what = f"devices={strategy.num_processes}, num_nodes={strategy.num_nodes} are {size} ranks, but the launcher"
        raise ConfigError([Problem("", f"{what} has started {topology.world_size}; set them to what it starts")])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if strategy.root_device.type != kind:
        what = f"Lightning's accelerator is {strategy.root_device.type}, but unishard computes on {kind}"
        raise ConfigError(
            [Problem("", f"{what}; pass accelerator='auto', or hide the GPUs by CUDA_VISIBLE_DEVICES=''")]
        )
    lifetime.ensure(topology, patience=cfg.communication.desync_timeout)
