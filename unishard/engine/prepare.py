"""From a model and a config to a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Config, Sharding, expect_config, leaves, value_at
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.distributed import collective_check, devices, process_group
from unishard.engine.inference import replicate_for_inference
from unishard.engine.model import activation_checkpointing, compilation, materialization
from unishard.engine.model.dtypes import cast_model
from unishard.engine.model.facts import ModelFacts, description_of, facts_of
from unishard.engine.model.units import Unit, find_conditional, find_units
from unishard.engine.optim import optimizers
from unishard.engine.optim.builder import Recipe
from unishard.engine.optim.schedulers import SchedulerFactory
from unishard.engine.verify import verify
from unishard.errors import BackendError, ConfigError, ModelError, Problem
from unishard.mapping.report import Translation
from unishard.plugins import registry, tested_versions
from unishard.plugins.backend import Backend, Engine, OptimizerFactory
from unishard.plugins.translate import translate

__all__ = ["prepare"]

_prepared: WeakSet[nn.Module] = WeakSet()
"""Models that have been sharded in place, which cannot be done twice."""


_SHARDING_PARAMETERS = ("full_shard", "hybrid_shard")
"""The strategies that leave something to shard where there are no gradients and no optimizer state."""


def prepare(
    model: nn.Module,
    cfg: Config,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    scheduler: SchedulerFactory | LRScheduler | None = None,
    *,
    train: bool = True,
) -> Engine:
    """Shard a model over all ranks and build its engine. Collective: call it on every rank with the same arguments.

    Starts the process group from torchrun's or srun's environment, or as a group of one. Parameters and buffers of rank 0
    are sent to all ranks first. Afterwards torch's random numbers are seeded with `training.seed` plus the rank, if it trains.

    Any number of models can be prepared in one process, in any order, each with a config of its own.

    Args:
        model: Any module, on any device, in fp32, bf16 or fp16: whole, or as `unishard.init` or `unishard.from_pretrained` leaves it.
            It is sharded in place; its trainable parameters are cast to `precision.master` before.
        cfg: What to run.
        optimizer: Left out, the config's `optimizer` section decides; else that section must be absent. Either an optimizer made
            from the model's own parameters and not stepped yet: it keeps its groups and options, and is moved to the sharded
            parameters, so that only the engine steps it from then on. Or a function that builds one from the trainable
            parameters it is given, all of them. Where parameters are sharded it sees parts of them, so its update must work
            element by element, as those of SGD and the Adam family do.
        scheduler: Left out, the config's `scheduler` section decides; else that section must be absent. Either a scheduler of torch or
            transformers, made on the `optimizer` that is passed, or a function from the optimizer to one. The engine steps it.
        train: False for a model that is only evaluated, such as a frozen teacher. It has no optimizer: its parameters are frozen and
            held in `precision.compute` alone, in parts under full_shard, else whole on each rank; it is put in evaluation mode, its
            forward builds no graph unless one of its inputs needs a gradient, and `backward` and `step` are refused. What the config
            says about the optimizer and the loop is not used.

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
    collective_check.meet("unishard.prepare")
    # First of all: whatever is refused below is then refused on every rank, and none is left waiting.
    facts_of_config = {path: value_at(cfg, path) for path, _ in leaves(Config)} | {
        "ranks that share one copy": shard_group_size(cfg, topology)
    }
    process_group.agree(facts_of_config, "configs")
    process_group.agree({"train": train} | description_of(model), "models")
    process_group.agree(optimizers.description_of(optimizer, model), "optimizers")
    backend = registry.get(cfg.backend)
    if install := registry.missing(backend):
        raise BackendError(f"backend {cfg.backend!r} needs packages that are not installed; {install}")
    tested_versions.warn_if_untested(backend, topology.rank)
    if not isinstance(model, nn.Module):
        raise ModelError(f"prepare needs a torch.nn.Module, got {type(model).__name__}")
    if model in _prepared:
        raise ModelError(f"this {type(model).__name__} has been prepared before; build the model anew and prepare it once")
    facts = facts_of(model, cfg.sharding, train=train)
    materialization.check(model)
    sharded = cfg.sharding.strategy != "no_shard"
    find_conditional(model, cfg.sharding)  # refuses what is not there, also where nothing is sharded
    units = find_units(model, cfg.sharding) if sharded else []
    recomputed, compiled = activation_checkpointing.find(model, cfg), compilation.find(model, cfg)
    recipe = Recipe(cfg, model, optimizer, scheduler) if train else None
    translation = translate(cfg, topology=topology).check(strict=cfg.strict)
    if recipe is None:
        given = [name for name, value in (("optimizer", optimizer), ("scheduler", scheduler)) if value is not None]
        if given:
            raise ConfigError([Problem(name, "was given to prepare with train=False, which updates nothing; remove it") for name in given])
        _prepared.add(model)
        cast_model(model, cfg.precision, train=False)
        compilation.apply(compiled, cfg.compile)
        return _evaluated(model, cfg, backend, translation, topology, units, facts)
    _prepared.add(model)
    kind = type(model).__name__  # `fully_shard` makes another of it
    cast_model(model, cfg.precision)
    # Recomputation inside compilation inside the engine's hooks: a compiled block then recomputes in its own graph, and gathers once.
    activation_checkpointing.apply(recomputed, selective=cfg.activation_checkpointing == "selective")
    compilation.apply(compiled, cfg.compile)
    devices.use_host_cores(cfg.offload, topology)
    engine = backend.prepare(model, cfg, translation, topology, units, recipe)
    engine.identify(kind, recipe.groups)
    if recipe.scheduler is not None:
        engine.follow(recipe.scheduler)
    names = [unit.name for unit in units]
    verify(engine.placement(), facts, cfg, engine.device, engine=translation.engine, units=names, parts=shard_group_size(cfg, topology))
    torch.manual_seed(cfg.training.seed + topology.rank)
    return engine


def _evaluated(
    model: nn.Module,
    cfg: Config,
    backend: Backend,
    translation: Translation,
    topology: Topology,
    units: Sequence[Unit],
    facts: ModelFacts,
) -> Engine:
    """An engine without an optimizer. Leaves the random numbers alone: evaluating must not change what is trained beside it."""
    if cfg.sharding.strategy in _SHARDING_PARAMETERS:
        names, runs = [unit.name for unit in units], translation.engine
        kind = type(model).__name__
        engine = backend.prepare(model, cfg, translation, topology, units, None)
        engine.identify(kind, [])
    else:
        names, runs = [], type(model).__name__
        casting = [unit.name for unit in find_units(model, Sharding())]
        engine = replicate_for_inference(model, cfg, process_group.device_of(topology), casting)
    verify(engine.placement(), facts, cfg, engine.device, engine=runs, units=names, parts=shard_group_size(cfg, topology))
    return engine
