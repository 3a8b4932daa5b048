"""From a model and a config to a running engine."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unishard import process_group, registry
from unishard.backend import Engine, OptimizerFactory
from unishard.config import Config, expect_config, leaves, value_at
from unishard.engine import compilation, desync, optimizers, recomputation
from unishard.engine.model import description_of, facts_of
from unishard.engine.recipe import Recipe
from unishard.engine.schedulers import SchedulerFactory
from unishard.engine.units import find_units, find_whole
from unishard.engine.verify import verify
from unishard.errors import BackendError, ModelError
from unishard.grouping import parts
from unishard.topology import Topology
from unishard.translation import translate

__all__ = ["prepare"]

_prepared: WeakSet[nn.Module] = WeakSet()
"""Models that have been sharded in place, which cannot be done twice."""


def prepare(
    model: nn.Module,
    cfg: Config,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    scheduler: SchedulerFactory | LRScheduler | None = None,
) -> Engine:
    """Shard a model over all ranks and build its engine. Collective: call it on every rank with the same arguments.

    Starts the process group from torchrun's or srun's environment, or as a group of one. Parameters and buffers of rank 0
    are sent to all ranks first. Afterwards torch's random numbers are seeded with `training.seed` plus the rank.

    Args:
        model: Any module, whole, on any device and in fp32. It is sharded in place.
        cfg: What to run.
        optimizer: Left out, the config's `optimizer` section decides; else that section must be absent. Either an optimizer made
            from the model's own parameters and not stepped yet: it keeps its groups and options, and is moved to the sharded
            parameters, so that only the engine steps it from then on. Or a function that builds one from the trainable
            parameters it is given, all of them. Where parameters are sharded it sees parts of them, so its update must work
            element by element, as those of SGD and the Adam family do.
        scheduler: Left out, the config's `scheduler` section decides; else that section must be absent. Either a scheduler of torch or
            transformers, made on the `optimizer` that is passed, or a function from the optimizer to one. The engine steps it.

    Returns:
        The engine. Use it as a context manager or call `close()`.

    Raises:
        BackendError: The backend is unknown, or its packages are not installed.
        ConfigError: The config cannot be honoured on this backend or this number of ranks, or has an optimizer or a scheduler
            beside the one that is passed, or the latter would not train the model as asked.
        ModelError: The model cannot be sharded as asked.
        RankMismatchError: Ranks hold different configs, models or optimizers.
        EngineMismatchError: What the backend built is not what was asked.
    """
    expect_config(cfg)
    topology = process_group.ensure(Topology.from_environment())
    desync.meet("unishard.prepare")
    # First of all: whatever is refused below is then refused on every rank, and none is left waiting.
    facts_of_config = {path: value_at(cfg, path) for path, _ in leaves(Config)} | {"ranks that share one copy": parts(cfg, topology)}
    process_group.agree(facts_of_config, "configs")
    process_group.agree(description_of(model), "models")
    process_group.agree(optimizers.description_of(optimizer, model), "optimizers")
    backend = registry.get(cfg.backend)
    if install := registry.missing(backend):
        raise BackendError(f"backend {cfg.backend!r} needs packages that are not installed; {install}")
    if not isinstance(model, nn.Module):
        raise ModelError(f"prepare needs a torch.nn.Module, got {type(model).__name__}")
    if model in _prepared:
        raise ModelError(f"this {type(model).__name__} has been prepared before; build the model anew and prepare it once")
    facts = facts_of(model, cfg.sharding)
    sharded = cfg.sharding.strategy != "no_shard"
    find_whole(model, cfg.sharding)  # refuses what is not there, also where nothing is sharded
    units = find_units(model, cfg.sharding) if sharded else []
    recomputed, compiled = recomputation.find(model, cfg), compilation.find(model, cfg)
    recipe = Recipe(cfg, model, optimizer, scheduler)
    translation = translate(cfg, topology=topology).check(strict=cfg.strict)
    _prepared.add(model)
    # Recomputation inside compilation inside the engine's hooks: a compiled block then recomputes in its own graph, and gathers once.
    recomputation.apply(recomputed, selective=cfg.activation_checkpointing == "selective")
    compilation.apply(compiled, cfg.compile)
    engine = backend.prepare(model, cfg, translation, topology, units, recipe)
    if recipe.scheduler is not None:
        engine.follow(recipe.scheduler)
    names = [unit.name for unit in units]
    verify(engine.placement(), facts, cfg, engine.device, engine=translation.engine, units=names, parts=parts(cfg, topology))
    torch.manual_seed(cfg.training.seed + topology.rank)
    return engine
