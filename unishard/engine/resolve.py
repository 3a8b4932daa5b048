"""Decide once what a config makes of a run. Nothing behind it reads the config."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.checkpoint.remote import store
from unishard.config import Config, leaves, value_at
from unishard.config.data_share import data_share_of
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract import registry, tested_versions
from unishard.contract.backend import Backend, OptimizerFactory
from unishard.contract.footprint import with_slices
from unishard.contract.kit import empty_parameters, input_casts, kept_fp32, replicated
from unishard.contract.kit.parameter_groups import matrices_of
from unishard.contract.model_shape import ModelShape
from unishard.contract.plan import ConfigText, GuardSpec, MemorySpec, ModelPlan, ObserveSpec, RunPlan
from unishard.contract.translate import translate
from unishard.engine.model import (
    activation_checkpointing,
    compilation,
    matmul,
    plain_modules,
    transformers_zero3,
)
from unishard.engine.model import facts as model_facts
from unishard.engine.model.activation_offload import units as activation_offload
from unishard.engine.model.quantization import adoption
from unishard.engine.model.quantization.requirements import check_quantized
from unishard.engine.model.shape import shape_of
from unishard.engine.model.units import units_of
from unishard.engine.optim import optimizers
from unishard.engine.optim.builder import OptimizerSetup
from unishard.engine.optim.schedulers import SchedulerFactory
from unishard.errors import BackendError, ConfigError, Problem
from unishard.observe.destinations.table import require_installed
from unishard.sequence.method import sequence_of

_SHARDS_PARAMETERS = ("full_shard", "hybrid_shard")
"""The strategies that shard parameters, so that they also apply to inference."""
_STRONGER = ("shard_optimizer", "shard_grad_op", "full_shard")


class Fingerprint(NamedTuple):
    """What the ranks compare before a plan is made, so that what it refuses is refused on every rank."""

    configs: dict[str, Any]
    models: dict[str, Any]
    optimizers: dict[str, Any]


def fingerprint_of(model: nn.Module, cfg: Config, topology: Topology, optimizer: object, *, train: bool) -> Fingerprint:
    """What must be equal on all ranks. Raises nothing."""
    values = {path: value_at(cfg, path) for path, _ in leaves(Config) if not path.startswith("launch.")}  # by host
    return Fingerprint(
        values | {"ranks that share one copy": shard_group_size(cfg, topology)},
        {"train": train} | model_facts.description_of(model) | adoption.description_of(model),
        optimizers.description_of(optimizer, model),
    )


def resolve(
    model: nn.Module,
    cfg: Config,
    topology: Topology,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    scheduler: SchedulerFactory | LRScheduler | None = None,
    *,
    train: bool = True,
) -> RunPlan:
    """Check everything and plan a run; needs no process group. Only freezes parameters without elements.

    The arguments and errors are those of `prepare`.
    """
    backend, strategy = _backend(cfg, topology), cfg.sharding.strategy
    transformers_zero3.refuse_zero3_of_transformers()
    whole_fp32 = strategy == "no_shard" and cfg.precision.compute == cfg.precision.master == "fp32"
    full = whole_fp32 and not cfg.parallel.slices if train else strategy not in _SHARDS_PARAMETERS
    check_quantized(model, cfg.quantization, topology)
    model_facts.check_model(model, train=train, forward_writes=topology.world_size == 1 and full)
    empty_parameters.freeze_empty(model)
    kept = kept_fp32.find_kept(model, cfg.precision, train=train)
    whole = replicated.find_replicated(model, cfg.sharding)
    units = units_of(model, cfg.sharding)
    input_casts.check([model, *(unit.module for unit in units.casting)], cfg.precision)
    recomputed = activation_checkpointing.find(model, cfg.activation_checkpointing, cfg.sharding)
    offloaded = activation_offload.find(model, cfg.offload.activations, cfg.sharding, recomputed)
    compiled = compilation.find(model, cfg.compile, cfg.sharding)
    setup = setup_of(cfg, model, optimizer, scheduler) if train else None
    translation = translate(cfg, topology=topology).check(strict=cfg.strict)
    matmul.check_matmul(cfg.precision)
    store.require_installed(cfg.checkpoint)
    if train:
        require_installed(cfg.logging)
    else:
        _require_none(optimizer=optimizer, scheduler=scheduler)
    shape, text = shape_of(model, cfg.sharding), text_of(cfg)
    full_copies = not train and strategy not in _SHARDS_PARAMETERS
    return RunPlan(
        topology=topology,
        backend=backend,
        engine=None if full_copies else backend.spec(cfg, translation, topology, shape, units),
        layout=partial(backend.layout, shape, cfg, topology),
        model=ModelPlan(
            classes={name: type(module).__name__ for name, module in model.named_modules()},
            shape=shape,
            precision=cfg.precision,
            offload=cfg.offload,
            kept=kept.names,
            replicated=whole if strategy != "no_shard" else (),
            units=units,
            recomputed=recomputed if train else [],
            offloaded=offloaded if train else [],
            selective=cfg.activation_checkpointing == "selective",
            compiled=compiled,
            compile=cfg.compile,
            plain=plain_modules.PlainModules(model),
        ),
        optimizer=setup,
        loop=cfg.training,
        sequence=sequence_of(model, cfg.parallel.sequence),
        tensor=cfg.parallel.tensor.size,
        data_share=data_share_of(cfg, topology),
        checkpoint=cfg.checkpoint,
        observe=observe_spec(cfg, text),
        memory=_memory(backend, shape, cfg, topology),
        guard=GuardSpec(
            communication=cfg.communication,
            full_weights=full,
            gathers=strategy in _SHARDS_PARAMETERS,
            shards=strategy != "no_shard",
            tested=not tested_versions.untested(backend),
        ),
        text=text,
    )


def _backend(cfg: Config, topology: Topology) -> Backend:
    backend = registry.get(cfg.backend)
    if install := registry.missing(backend):
        raise BackendError(f"backend {cfg.backend!r} needs packages that are not installed; {install}")
    tested_versions.warn_if_untested(backend, topology.rank)
    return backend


def setup_of(
    cfg: Config,
    model: nn.Module,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None,
    scheduler: SchedulerFactory | LRScheduler | None,
) -> OptimizerSetup:
    """Plan the optimizer and the scheduler.

    Raises:
        ConfigError: One is set twice, or would not train the model as configured.
    """
    problems = [
        Problem(
            name, f"is in the config and was also passed to prepare; remove one of them: {name}={type(given).__name__}"
        )
        for name, given in (("optimizer", optimizer), ("scheduler", scheduler))
        if given is not None and name in cfg.model_fields_set
    ]
    if problems:
        raise ConfigError(problems)
    chosen = optimizer is None and cfg.optimizer.name == "muon"
    return OptimizerSetup(
        model,
        cfg.optimizer,
        cfg.scheduler,
        optimizer,
        scheduler,
        matrices=matrices_of(cfg.optimizer, shape_of(model, cfg.sharding).trainable) if chosen else (),
    )


def _require_none(**arguments: object) -> None:
    problems = [
        Problem(name, "was passed to prepare with train=False, which does no updates; remove it")
        for name, value in arguments.items()
        if value is not None
    ]
    if problems:
        raise ConfigError(problems)


def text_of(cfg: Config) -> ConfigText:
    """The config as plain data."""
    return ConfigText(
        fields={path: value_at(cfg, path) for path, _ in leaves(Config)},
        given=cfg.model_dump(exclude_unset=True),
        saved=cfg.model_dump(mode="json", exclude={"launch"}),
    )


def observe_spec(cfg: Config, text: ConfigText) -> ObserveSpec:
    """What is measured, traced and written."""
    return ObserveSpec(
        cfg.logging,
        cfg.profile,
        cfg.scheduler.total_steps,
        cfg.precision.compute,
        cfg.parallel.tensor.size,
        cfg.parallel.sequence.size,
        text,
    )


def _memory(backend: Backend, shape: ModelShape, cfg: Config, topology: Topology) -> MemorySpec:
    return MemorySpec(
        footprint=lambda *changes: with_slices(
            backend.footprint, shape, cfg.override(*changes) if changes else cfg, topology
        ),
        of_activations=dict(_saving_activations(cfg)),
        of_state=list(_saving_state(cfg)),
    )


def _saving_activations(cfg: Config) -> Iterator[tuple[str, float]]:
    training = cfg.training
    if cfg.activation_checkpointing == "none":
        yield "activation_checkpointing=full", 3 / 4
    if training.micro_batch_size > 1 and training.micro_batch_size % 2 == 0:
        sizes = f"micro_batch_size={training.micro_batch_size // 2}"
        windows = f"gradient_accumulation_steps={2 * training.gradient_accumulation_steps}"
        yield f"training.{sizes} training.{windows}", 1 / 2


def _saving_state(cfg: Config) -> Iterator[str]:
    strategy = cfg.sharding.within_group
    after = _STRONGER[_STRONGER.index(strategy) + 1 :] if strategy in _STRONGER else _STRONGER
    if not cfg.sharding.hybrid:
        yield from (f"sharding.strategy={name}" for name in after)
    if cfg.offload.optimizer == "none" and strategy != "no_shard":
        yield "offload.optimizer=cpu"
