"""From a model and a config to a running engine."""

from __future__ import annotations

import torch
from torch import nn

from unishard import process_group, registry
from unishard.backend import Engine, OptimizerFactory
from unishard.config import Config, leaves, value_at
from unishard.engine.optimizers import factory
from unishard.engine.units import find_units
from unishard.engine.verify import description_of, facts_of, verify
from unishard.errors import BackendError, ConfigError, ModelError, Problem
from unishard.topology import Topology
from unishard.translation import translate

__all__ = ["prepare"]


def prepare(model: nn.Module, cfg: Config, optimizer: OptimizerFactory | None = None) -> Engine:
    """Shard a model over all ranks and build its engine. Collective: call it on every rank with the same arguments.

    Starts the process group from torchrun's or srun's environment, or as a group of one. Parameters and buffers of rank 0
    are sent to all ranks first. Afterwards each rank's random numbers are seeded with `training.seed` plus its rank.

    Args:
        model: Any module, whole, on any device and in fp32. It is sharded in place.
        cfg: What to run.
        optimizer: Builds the optimizer from the trainable parameters; left out, the config's `optimizer` section decides, which
            must be absent otherwise.

    Returns:
        The engine. Use it as a context manager or call `close()`.

    Raises:
        BackendError: The backend is unknown, or its packages are not installed.
        ConfigError: The config cannot be honoured on this backend or this number of ranks, or has an optimizer beside the factory.
        ModelError: The model cannot be sharded as asked.
        RankMismatchError: Ranks hold different configs or models.
        EngineMismatchError: What the backend built is not what was asked.
    """
    topology = process_group.ensure(Topology.from_environment())
    # First of all: whatever is refused below is then refused on every rank, and none is left waiting.
    process_group.agree({path: value_at(cfg, path) for path, _ in leaves(Config)}, "configs")
    process_group.agree(description_of(model), "models")
    backend = registry.get(cfg.backend)
    if install := registry.missing(backend):
        raise BackendError(f"backend {cfg.backend!r} needs packages that are not installed; {install}")
    if not isinstance(model, nn.Module):
        raise ModelError(f"prepare needs a torch.nn.Module, got {type(model).__name__}")
    facts = facts_of(model)
    units = [] if cfg.sharding.strategy == "no_shard" else find_units(model, cfg.sharding)
    if optimizer is not None and "optimizer" in cfg.model_fields_set:
        raise ConfigError([Problem("optimizer", "is in the config, and prepare was given a factory as well; remove one of the two")])
    translation = translate(cfg, topology=topology).check(strict=cfg.strict)
    engine = backend.prepare(model, cfg, translation, topology, units, optimizer or factory(cfg.optimizer))
    verify(engine.placement(), facts, cfg, engine.device, engine=translation.engine, units=[unit.name for unit in units])
    torch.manual_seed(cfg.training.seed + topology.rank)
    return engine
