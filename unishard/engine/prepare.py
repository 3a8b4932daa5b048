"""Prepare a model: build its engine from a config."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unishard.config import Communication, Config, expect_config
from unishard.config.loading import launched
from unishard.config.shard_groups import check_groups, shard_group_size
from unishard.config.topology import Topology
from unishard.contract.adapter import ShardedModel
from unishard.contract.backend import OptimizerFactory
from unishard.contract.kit import kept_fp32, materialization, replicated
from unishard.contract.kit.dtypes import cast_model
from unishard.contract.plan import RunPlan
from unishard.distributed import agreement, devices
from unishard.distributed.layout import Layout
from unishard.engine.around_forward import AroundForward
from unishard.engine.engine import Engine
from unishard.engine.guards.inference_mode import as_no_grad
from unishard.engine.inference import ReplicaAdapter
from unishard.engine.loop.training_mode import put_in_training_mode
from unishard.engine.model import activation_checkpointing, compilation, matmul
from unishard.engine.model.activation_offload import units as activation_offload
from unishard.engine.model.batch_norm import name_synchronized
from unishard.engine.model.plain_modules import PREPARED
from unishard.engine.model.quantization.adoption import adopt
from unishard.engine.model.unprepared import allow_forwards
from unishard.engine.optim import stepping
from unishard.engine.optim.eight_bit import share_blocks
from unishard.engine.optim.matrices import share_matrices, share_whole_tensors
from unishard.engine.optim.schedulers import SchedulerFactory
from unishard.engine.resolve import Fingerprint, fingerprint_of, resolve
from unishard.engine.verify import verify
from unishard.errors import ModelError
from unishard.failures import collective_check, lifetime, monitor_client
from unishard.failures.endings import explain_lost_connections
from unishard.nvme.offload import FileOffload
from unishard.observe.expected_memory import ExpectedMemory
from unishard.parallel.groups import make_groups
from unishard.parallel.sliced_model import SlicedModel

_WRAPPERS = {"DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "_FabricModule"}
"""Of other engines, by the names of their classes."""


def prepare(
    model: nn.Module,
    cfg: Config,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    scheduler: SchedulerFactory | LRScheduler | None = None,
    *,
    train: bool = True,
    reseed: bool = True,
) -> Engine:
    """Shard a model over all ranks and build its engine. Collective: call it on every rank with the same arguments.

    Starts the process group from torchrun's or srun's environment, or a group of one rank. Parameters and buffers are
    first broadcast from rank 0. With `train=True`, torch is seeded with `training.seed` plus the rank
    afterwards, unless `reseed` is False; ranks that have layers together get the same seed.

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
            function that builds one from all trainable parameters, and may be called again with other tensors.
        scheduler: By default, the config's `scheduler` section is used; if this is given, the config must have no such
            section. Either a scheduler of torch or transformers on the `optimizer` that is passed, or a function that
            builds one from the optimizer. The engine steps it.
        train: False for inference, for example with a frozen teacher. There is no optimizer. Parameters are frozen and
            kept only in `precision.compute`, sharded under full_shard, else replicated. The model is put in evaluation
            mode, its forward builds a graph only if an input requires a gradient, and `backward` and `step` raise an
            error. The config's optimizer and loop settings are ignored.
        reseed: False to leave torch's random state as it is, where a framework has seeded it.

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
    if message := launched.unused():
        warnings.warn(message, UserWarning, stacklevel=2)
    _require_unwrapped(model)
    with as_no_grad(), _group(cfg.communication) as topology:
        _agree(fingerprint_of(model, cfg, topology, optimizer, train=train))
        _require_new(model)
        _free_closed_engines()
        allow_forwards(model)
        adopt(model)
        check_groups(cfg, topology)
        groups_of = partial(make_groups, shared=shard_group_size(cfg, topology) if cfg.sharding.hybrid else None)
        with ExitStack() as opened:  # until the engine closes it
            sliced = SlicedModel(model, cfg.parallel, groups_of)
            opened.callback(sliced.close)
            plan = resolve(model, cfg, topology, optimizer, scheduler, train=train)
            around = AroundForward(model, plan, sliced)
            opened.callback(around.close)
            sliced.let_go()
            files = FileOffload(plan.model.offload, topology)
            opened.callback(files.close)
            adapter = _shard(model, plan)
            sliced.count_gradients(over_holders=plan.backend.averages_over_holders)
            adapter.forward_is_collective |= sliced.exchanges
            opened.callback(adapter.close)
            layout = plan.layout(() if plan.optimizer is None else plan.optimizer.groups)
            _verify(adapter, plan, layout)
            if adapter.updates is not None and plan.optimizer is not None:
                share_matrices(adapter.updates, plan.optimizer.groups, layout)
                share_blocks(adapter.updates, plan.optimizer.groups, layout, topology.rank)
                share_whole_tensors(adapter.updates, plan, layout)
            files.take(adapter)
            engine = Engine(adapter, plan, around, opened)
        return engine if plan.optimizer is None else _begin(engine, plan, reseed=reseed)


@contextmanager
def _group(communication: Communication) -> Iterator[Topology]:
    """The process group, in which an error names the rank that has caused it, and ends the other ranks. Collective."""
    with explain_lost_connections():
        topology = lifetime.ensure(Topology.from_environment(), communication)
        with monitor_client.blocking_call():
            collective_check.begin(communication)
            with collective_check.announce_errors("unishard.prepare"):
                yield topology


def _agree(fingerprint: Fingerprint) -> None:
    """Check that all ranks have the same arguments, so that later errors are raised on every rank. Collective."""
    collective_check.check_now("unishard.prepare")
    for subject, facts in fingerprint._asdict().items():
        agreement.agree(facts, subject)


def _free_closed_engines() -> None:
    """Free the device memory of engines that were closed before. What they leave is in cycles of references, which only
    Python's collector finds, and it runs by the number of objects, not by what is left of the device's memory.
    """
    if torch.cuda.is_initialized() and torch.cuda.memory_allocated():  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first frees what holds others from C++
            gc.collect()


def _shard(model: nn.Module, plan: RunPlan) -> ShardedModel:
    """Change the model as planned, and build its engine. Collective."""
    collective_check.check_now("unishard.prepare (sharding)")
    planned, trains = plan.model, plan.optimizer is not None
    materialization.check(model, train=trains)
    matmul.set_matmul(planned.precision)
    kept_fp32.mark_kept(model, planned.kept)
    replicated.mark_replicated(model, planned.replicated)
    PREPARED.update(model.modules())
    cast_model(model, planned.precision, train=trains)
    # Recomputation inside compilation inside the engine's hooks: a compiled block then recomputes in its own graph, and
    # gathers once. Offload around both: what they keep goes to the host.
    activation_checkpointing.apply(planned.recomputed, selective=planned.selective)
    compilation.apply(planned.compiled, planned.compile)
    device = devices.device_of(plan.topology)
    activation_offload.apply(planned.offloaded, device, pin_memory=planned.offload.pin_memory)
    casting = [unit.module for unit in planned.units.casting]
    if trains:
        stepping.mark(model)
        put_in_training_mode(model, plan.topology.rank)
        name_synchronized(model, plan.topology, device)
        devices.use_host_cores(planned.offload, plan.topology)
    if plan.engine is not None:
        return plan.backend.build(model, plan)
    return ReplicaAdapter(model, planned.precision, device, casting)


def _verify(adapter: ShardedModel, plan: RunPlan, layout: Mapping[str, Layout]) -> None:
    """Compare what was built with what was planned. Collective."""
    collective_check.check_now("unishard.prepare (checking the engine)")
    if plan.optimizer is not None and plan.optimizer.from_caller:  # what a function makes is known only now
        agreement.agree(plan.optimizer.description, "optimizers")
    placement = adapter.placement()
    verify(adapter, placement, plan, layout)
    if plan.optimizer is not None:
        ExpectedMemory(plan.memory).compare(placement, adapter.device)


def _begin(engine: Engine, plan: RunPlan, *, reseed: bool) -> Engine:
    """Seed torch, and resume if asked: not for inference, which must not affect another model's training.

    Collective.
    """
    if reseed:
        torch.manual_seed(plan.loop.seed + plan.topology.rank // plan.tensor)
    if plan.checkpoint.dir is not None and plan.checkpoint.on_existing == "resume":
        try:
            engine.load("latest")
        except BaseException as error:
            engine.__exit__(type(error), error, None)
            raise
    return engine


def _require_unwrapped(model: object) -> None:
    """Check that a model is one, and not another engine's wrapper, which would run inside this one.

    Raises:
        ModelError: It is not. Classes are compared by name, so that nothing is imported for it.
    """
    if any(kind.__name__ in _WRAPPERS for kind in type(model).__mro__):
        raise ModelError(
            f"prepare needs the model itself, got {type(model).__name__}; pass the model that it wraps: its `module`"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"prepare needs a torch.nn.Module, got {type(model).__name__}; pass the model: prepare(model, cfg)"
        )


def _require_new(model: nn.Module) -> None:
    """Check that no part of a model belongs to an engine.

    Raises:
        ModelError: It was prepared, or a part of it with parameters was.
    """
    if model in PREPARED:
        raise ModelError(
            f"this {type(model).__name__} was already prepared; call engine.framework.release() on its engine in place "
            "of close(), which makes it plain again, or build a new model"
        )
    shared = (
        f"module {name}"
        for name, module in model.named_modules()
        if module in PREPARED and any(True for _ in module.parameters())
    )
    tied = (f"parameter {name}" for name, parameter in model.named_parameters() if stepping.is_marked(parameter))
    if part := next(chain(shared, tied), None):
        raise ModelError(
            f"{part} of {type(model).__name__} was already prepared in another model, whose engine shards and trains "
            "it; prepare one model that contains both and let its forward choose, or give each model its own copy "
            "before prepare, such as copy.deepcopy(module)"
        )
