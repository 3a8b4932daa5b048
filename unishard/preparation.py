"""From a model and a config to a running engine."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn

from unishard import process_group, registry
from unishard.backend import Engine, OptimizerFactory
from unishard.config import Config, expect_config, leaves, value_at
from unishard.engine.model import description_of, facts_of
from unishard.engine.optimizers import checked, factory
from unishard.engine.units import find_units
from unishard.engine.verify import verify
from unishard.errors import BackendError, ConfigError, ModelError, Problem
from unishard.topology import Topology
from unishard.translation import translate

__all__ = ["prepare"]

_prepared: WeakSet[nn.Module] = WeakSet()
"""Models that have been sharded in place, which cannot be done twice."""


def prepare(model: nn.Module, cfg: Config, optimizer: OptimizerFactory | None = None) -> Engine:
    """Shard a model over all ranks and build its engine. Collective: call it on every rank with the same arguments.

    Starts the process group from torchrun's or srun's environment, or as a group of one. Parameters and buffers of rank 0
    are sent to all ranks first. Afterwards torch's random numbers are seeded with `training.seed` plus the rank.

    Args:
        model: Any module, whole, on any device and in fp32. It is sharded in place.
        cfg: What to run.
        optimizer: Builds a torch optimizer from the trainable parameters it is given, all of them; left out, the config's
            `optimizer` section decides, which must be absent otherwise. Where parameters are sharded it sees parts of them, so
            its update must work element by element, as those of SGD and the Adam family do.

    Returns:
        The engine. Use it as a context manager or call `close()`.

    Raises:
        BackendError: The backend is unknown, or its packages are not installed.
        ConfigError: The config cannot be honoured on this backend or this number of ranks, or has an optimizer beside the factory.
        ModelError: The model cannot be sharded as asked.
        RankMismatchError: Ranks hold different configs or models.
        EngineMismatchError: What the backend built is not what was asked.
    """
    expect_config(cfg)
    topology = process_group.ensure(Topology.from_environment())
    # First of all: whatever is refused below is then refused on every rank, and none is left waiting.
    process_group.agree({path: value_at(cfg, path) for path, _ in leaves(Config)}, "configs")
    process_group.agree(description_of(model), "models")
    backend = registry.get(cfg.backend)
    if install := registry.missing(backend):
        raise BackendError(f"backend {cfg.backend!r} needs packages that are not installed; {install}")
    if not isinstance(model, nn.Module):
        raise ModelError(f"prepare needs a torch.nn.Module, got {type(model).__name__}")
    if model in _prepared:
        raise ModelError(f"this {type(model).__name__} has been prepared before; build the model anew and prepare it once")
    facts = facts_of(model, cfg.sharding)
    sharded = cfg.sharding.strategy != "no_shard"
    units = find_units(model, cfg.sharding) if sharded else []
    if optimizer is not None and "optimizer" in cfg.model_fields_set:
        raise ConfigError([Problem("optimizer", "is in the config, and prepare was given a factory as well; remove one of the two")])
    build = factory(cfg.optimizer) if optimizer is None else checked(optimizer, sharded=sharded and topology.world_size > 1)
    translation = translate(cfg, topology=topology).check(strict=cfg.strict)
    _prepared.add(model)
    engine = backend.prepare(model, cfg, translation, topology, units, build)
    verify(engine.placement(), facts, cfg, engine.device, engine=translation.engine, units=[unit.name for unit in units])
    torch.manual_seed(cfg.training.seed + topology.rank)
    return engine
