"""Prepare a model: build its engine from a config."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Config, expect_config, leaves, value_at
from unishard.config.hints.arguments import instead
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract import registry, tested_versions
from unishard.contract.adapter import InferenceAdapter
from unishard.contract.backend import Backend, OptimizerFactory
from unishard.contract.report import Translation
from unishard.contract.results import Placement
from unishard.contract.translate import translate
from unishard.contract.units import ModelUnits, Unit
from unishard.distributed import devices, process_group
from unishard.engine.engine import Engine
from unishard.engine.inference import ReplicaAdapter
from unishard.engine.loop.guarded_module import holds_full_weights
from unishard.engine.loop.module_order import named_with_class
from unishard.engine.loop.training_mode import put_in_training_mode
from unishard.engine.loop.written_parameters import WrittenParameters
from unishard.engine.model import (
    activation_checkpointing,
    batch_norm,
    compilation,
    input_casts,
    kept_fp32,
    materialization,
    matmul,
    zero3_of_transformers,
)
from unishard.engine.model.dtypes import cast_model
from unishard.engine.model.empty_parameters import freeze_empty
from unishard.engine.model.facts import ModelFacts, description_of, facts_of
from unishard.engine.model.shape import shape_of
from unishard.engine.model.units import units_of
from unishard.engine.optim import optimizers, stepping
from unishard.engine.optim.builder import OptimizerSetup
from unishard.engine.optim.schedulers import SchedulerFactory
from unishard.engine.verify import verify
from unishard.errors import BackendError, ConfigError, ModelError, Problem
from unishard.failures import collective_check, lifetime, monitor_client
from unishard.failures.endings import naming_causes
from unishard.observe.destinations.table import require_installed
from unishard.observe.expected_memory import ExpectedMemory

__all__ = ["prepare"]

_prepared: WeakSet[nn.Module] = WeakSet()
"""Models that were sharded in place, and their modules; this is possible only once."""

_SHARDS_PARAMETERS = ("full_shard", "hybrid_shard")
"""The strategies that shard parameters, so that they also apply to inference."""


def prepare(
    model: nn.Module,
    cfg: Config,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    scheduler: SchedulerFactory | LRScheduler | None = None,
    *,
    train: bool = True,
) -> Engine:
    """Shard a model over all ranks and build its engine. Collective: call it on every rank with the same arguments.

    Starts the process group from torchrun's or srun's environment, or a group of one rank. Parameters and buffers are
    first broadcast from rank 0. With `train=True`, torch is seeded with `training.seed` plus the rank afterwards.

    Any number of models can be prepared in one process, in any order, each with its own config.

    With `checkpoint.on_existing: resume` and `train=True`, the run then resumes from the newest checkpoint in
    `checkpoint.dir`, if there is one: `engine.resumed`.

    Args:
        model: Any module, on any device, in fp32, bf16 or fp16: full, or as `unishard.init` or
            `unishard.from_pretrained` leaves it. It is sharded in place, after its trainable parameters are cast to
            `precision.master`, and put in training mode.
        cfg: What to run.
        optimizer: By default, the config's `optimizer` section is used; if this is given, the config must have no such
            section. Either an optimizer that was made from the model's parameters and has not stepped yet: it keeps its
            groups and options and is moved to the sharded parameters, and from then on only the engine steps it. Or a
            function that builds one from all trainable parameters. It may get shards of parameters, so its update must
            be element-wise, as in SGD and the Adam family.
        scheduler: By default, the config's `scheduler` section is used; if this is given, the config must have no such
            section. Either a scheduler of torch or transformers on the `optimizer` that is passed, or a function that
            builds one from the optimizer. The engine steps it.
        train: False for inference, for example with a frozen teacher. There is no optimizer. Parameters are frozen and
            kept only in `precision.compute`, sharded under full_shard, else replicated. The model is put in evaluation
            mode, its forward builds a graph only if an input requires a gradient, and `backward` and `step` raise an
            error. The config's optimizer and loop settings are ignored.

    Returns:
        The engine. Use it as a context manager or call `close()`.

    Raises:
        BackendError: The backend is unknown, or its packages are not installed.
        CheckpointError: With `checkpoint.on_existing: resume`, the newest checkpoint cannot be loaded, as in
            `Engine.load`.
        ConfigError: The backend or the number of ranks does not support the config, the config has an optimizer or
            scheduler in addition to the one passed, or the one passed would not train the model as configured.
        ModelError: The model cannot be sharded as configured.
        RankMismatchError: Ranks hold different configs, models, optimizers or schedulers, or another rank has ended.
        EngineMismatchError: The backend's engine does not match the config.
    """
    expect_config(cfg)
    _require_module(model)
    with naming_causes():
        topology = lifetime.ensure(Topology.from_environment(), patience=cfg.communication.desync_timeout)
        with monitor_client.asking():
            collective_check.begin(cfg.communication)
            with collective_check.leaving("unishard.prepare"):
                return _prepare(model, cfg, topology, optimizer, scheduler, train=train)


def _prepare(
    model: nn.Module,
    cfg: Config,
    topology: Topology,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None,
    scheduler: SchedulerFactory | LRScheduler | None,
    *,
    train: bool,
) -> Engine:
    """Check, shard, verify.

    Collective; enters each part together with the other ranks, so that an error of one ends all.
    """
    _agree(model, cfg, topology, optimizer, train=train)
    backend = _backend(cfg, topology)
    plan = _plan(model, cfg, topology, optimizer, scheduler, train=train)
    collective_check.check_now("unishard.prepare (sharding)")
    matmul.apply(cfg.precision)
    kept_fp32.mark(model, plan.kept)
    # From here on the model changes.
    _prepared.update(model.modules())
    model_class = type(model).__name__  # `fully_shard` changes the class
    shape = shape_of(model, cfg.sharding)
    cast_model(model, cfg.precision, train=train)
    # Recomputation inside compilation inside the engine's hooks: a compiled block then recomputes in its own graph, and
    # gathers once.
    activation_checkpointing.apply(plan.recomputed, selective=cfg.activation_checkpointing == "selective")
    compilation.apply(plan.compiled, cfg.compile)
    if train:
        stepping.mark(model)
        put_in_training_mode(model, topology.rank)
        batch_norm.name_synchronized(model, topology, process_group.device_of(topology))
        devices.use_host_cores(cfg.offload, topology)
    units = named_with_class(plan.units.casting)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    written = WrittenParameters(model, units.values()) if train and not holds_full_weights(cfg, trains=True) else None
    memory = ExpectedMemory(backend, shape, cfg, topology)
    adapter = _adapter(model, cfg, backend, plan, topology)
    with ExitStack() as failed:
        failed.callback(adapter.close)
        collective_check.check_now("unishard.prepare (checking the engine)")
        setup = plan.setup
        if setup is not None and not (optimizer is scheduler is None):  # what a function makes is known only now
            process_group.agree(setup.description, "optimizers")
        placement = _verify(adapter, model_class, cfg, plan, topology)
        if setup is None:  # keep the random state: inference must not affect another model's training
            engine = Engine(cfg, adapter, model_class=model_class, units=units)
        else:
            engine = Engine(
                cfg,
                adapter,
                model_class=model_class,
                group_names=setup.groups,
                optimizer=setup.optimizer,
                scheduler=setup.scheduler,
                units=units,
                classes=classes,
                memory=memory,
                written=written,
            )
        failed.pop_all()
    if not train:
        return engine
    memory.compare(placement, adapter.device)
    torch.manual_seed(cfg.training.seed + topology.rank)
    if cfg.checkpoint.dir is not None and cfg.checkpoint.on_existing == "resume":
        _resume(engine)
    return engine


def _resume(engine: Engine) -> None:
    """Load the newest checkpoint of `checkpoint.dir`, if it holds one. Collective."""
    try:
        engine.load("latest")
    except BaseException as error:
        engine.__exit__(type(error), error, None)
        raise


class _Plan(NamedTuple):
    """What to build. Making the plan changes nothing that holds data and raises on every rank if it cannot be built."""

    facts: ModelFacts
    kept: kept_fp32.Kept
    units: ModelUnits
    recomputed: list[Unit]
    compiled: list[Unit]
    setup: OptimizerSetup | None
    """None for inference."""
    replicated: bool
    """Whether each rank holds the full model without a sharding engine: inference under a strategy that shards no
    parameters."""
    translation: Translation


def _agree(
    model: nn.Module,
    cfg: Config,
    topology: Topology,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None,
    *,
    train: bool,
) -> None:
    """Check that all ranks have the same arguments, so that later errors are raised on every rank. Collective."""
    collective_check.check_now("unishard.prepare")
    said = {
        path: value_at(cfg, path) for path, _ in leaves(Config) if not path.startswith("launch.")
    }  # may differ by host
    process_group.agree(said | {"ranks that share one copy": shard_group_size(cfg, topology)}, "configs")
    process_group.agree({"train": train} | description_of(model), "models")
    process_group.agree(optimizers.description_of(optimizer, model), "optimizers")


def _backend(cfg: Config, topology: Topology) -> Backend:
    backend = registry.get(cfg.backend)
    if install := registry.missing(backend):
        raise BackendError(f"backend {cfg.backend!r} needs packages that are not installed; {install}")
    tested_versions.warn_if_untested(backend, topology.rank)
    return backend


def _plan(
    model: nn.Module,
    cfg: Config,
    topology: Topology,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None,
    scheduler: SchedulerFactory | LRScheduler | None,
    *,
    train: bool,
) -> _Plan:
    """Check everything, and freeze empty parameters. Collective."""
    _require_new(model)
    zero3_of_transformers.check()
    stays = topology.world_size == 1 and holds_full_weights(cfg, trains=train)
    facts = facts_of(model, train=train, forward_writes=stays)
    freeze_empty(model)
    materialization.check(model, train=train)
    kept = kept_fp32.find(model, cfg.precision, train=train)
    units = units_of(model, cfg.sharding)
    input_casts.check([model, *(unit.module for unit in units.casting)], cfg.precision)
    recomputed, compiled = activation_checkpointing.find(model, cfg), compilation.find(model, cfg)
    setup = OptimizerSetup(cfg, model, optimizer, scheduler) if train else None
    translation = translate(cfg, topology=topology).check(strict=cfg.strict)
    matmul.check(cfg.precision)
    if train:
        require_installed(cfg.logging)
    given = [name for name, value in (("optimizer", optimizer), ("scheduler", scheduler)) if value is not None]
    if given and not train:
        raise ConfigError(
            [
                Problem(name, "was passed to prepare with train=False, which does no updates; remove it")
                for name in given
            ]
        )
    replicated = not train and cfg.sharding.strategy not in _SHARDS_PARAMETERS
    return _Plan(facts, kept, units, recomputed if train else [], compiled, setup, replicated, translation)


def _require_module(model: object) -> None:
    """Check that a model is a plain module.

    Raises:
        ModelError: It is something else, or another engine's wrapper.
    """
    hint = instead("model", model)
    if hint and not (isinstance(model, nn.Module) and hint == instead("model", object())):
        raise ModelError(f"prepare needs a torch.nn.Module, got {type(model).__name__}; {hint}")


def _require_new(model: nn.Module) -> None:
    """Check that no part of a model belongs to an engine.

    Raises:
        ModelError: It was prepared, or a part of it with parameters was.
    """
    if model in _prepared:
        raise ModelError(f"this {type(model).__name__} was already prepared; build a new model and prepare it once")
    shared = (
        f"module {name}"
        for name, module in model.named_modules()
        if module in _prepared and any(True for _ in module.parameters())
    )
    tied = (f"parameter {name}" for name, parameter in model.named_parameters() if stepping.is_marked(parameter))
    if part := next(chain(shared, tied), None):
        raise ModelError(
            f"{part} of {type(model).__name__} was already prepared in another model, whose engine shards and trains "
            "it; prepare one model "
            "that contains both and let its forward choose, or give each model its own copy before prepare, such as "
            "copy.deepcopy(module)"
        )


def _adapter(model: nn.Module, cfg: Config, backend: Backend, plan: _Plan, topology: Topology) -> InferenceAdapter:
    """Shard the model. Collective."""
    if plan.replicated:
        return ReplicaAdapter(
            model, cfg, process_group.device_of(topology), [unit.module for unit in plan.units.casting]
        )
    return backend.prepare(model, cfg, plan.translation, topology, plan.units, plan.setup)


def _verify(adapter: InferenceAdapter, model_class: str, cfg: Config, plan: _Plan, topology: Topology) -> Placement:
    """Compare what was built with what was asked, and return what was built. Collective."""
    placement = adapter.placement()
    verify(
        placement,
        plan.facts,
        cfg,
        adapter.device,
        engine=model_class if plan.replicated else plan.translation.engine,
        units=[] if plan.replicated else [unit.name for unit in plan.units.gathered],
        group_size=shard_group_size(cfg, topology),
        kept=plan.kept.elements,
    )
    return placement
