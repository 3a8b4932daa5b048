"""Build an adapter from a model and the translated JSON."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Precision
from unishard.contract.adapter import ShardedModel
from unishard.contract.backend import OptimizerBuilder
from unishard.contract.kit import materialization
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.kit.replicated import is_replicated
from unishard.contract.plan import RunPlan
from unishard.contract.private_api import PrivateApi
from unishard.contract.units import ModelUnits
from unishard.distributed.broadcast import broadcast, make_dense
from unishard.distributed.devices import device_of
from unishard_deepspeed import start
from unishard_deepspeed.cases import kept_fp32
from unishard_deepspeed.cases.case import ZeroCase
from unishard_deepspeed.cases.conditional_modules import ConditionalModules
from unishard_deepspeed.cases.late_steps import LateSteps
from unishard_deepspeed.cases.persistent_parameters import PersistentParameters
from unishard_deepspeed.cases.second_copies import SecondCopies
from unishard_deepspeed.cases.stale_gradients import StaleGradients
from unishard_deepspeed.masters.inner_optimizer import InnerOptimizer
from unishard_deepspeed.model import ZeroModel
from unishard_deepspeed.private.building import allow_fp16, clear_mpu
from unishard_deepspeed.private.partitioned import is_partitioned
from unishard_deepspeed.private.requirements import require_for
from unishard_deepspeed.private.second_copy import own_group
from unishard_deepspeed.private.stage_0 import Stage0
from unishard_deepspeed.private.stage_3 import Stage3
from unishard_deepspeed.private.stages_1_2 import Stages12
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer
from unishard_deepspeed.private.zero_parameters import ZeroParameters
from unishard_deepspeed.sharding import partitioning
from unishard_deepspeed.sharding.entered_modules import entered_modules
from unishard_deepspeed.sharding.frozen_stage_3 import FrozenStage3
from unishard_deepspeed.sharding.replicas import Replicas, replicas_of
from unishard_deepspeed.sharding.unit_outputs import ListedOutputs
from unishard_deepspeed.spec import ZeroSpec
from unishard_deepspeed.updates import ZeroUpdates

_OPTIMIZERS: tuple[type[ZeroOptimizer], ...] = (Stage0, Stages12, Stages12, Stage3)
"""By the stage of ZeRO."""


def build(model: nn.Module, plan: RunPlan) -> ShardedModel:
    """Shard a model in place and put an adapter around its engine. Collective.

    Args:
        model: Full on rank 0, trainable parameters in `precision.master`; rank 0's parameters and buffers are used.
        plan: Its units are the leaf modules of stage 3. Without an optimizer it is inference at stage 3.
    """
    spec, units = cast(ZeroSpec, plan.engine), plan.model.units
    zero = _OPTIMIZERS[spec.zero["stage"]]
    kept_fp32.check(model, spec, zero)
    deepspeed = start.load(plan.topology)
    device = device_of(plan.topology)
    require_for(spec, zero.cases, device.type, trains=plan.optimizer is not None, units=bool(units.gathered))
    replicas = None if spec.replicas is None else replicas_of(spec.replicas, device.type)
    if spec.precision.compute == "fp16":
        allow_fp16()
    with own_group() if spec.second_copies else nullcontext():
        if plan.optimizer is None:
            return _frozen(deepspeed, model, spec, device, units, replicas)
        return _trained(deepspeed, model, spec, zero, device, units, plan.optimizer, replicas)


def _frozen(
    deepspeed: ModuleType,
    model: nn.Module,
    spec: ZeroSpec,
    device: torch.device,
    units: ModelUnits,
    replicas: Replicas | None,
) -> ShardedModel:
    """A model for inference at stage 3."""
    settings = copy.deepcopy(spec.native)
    partitioning.partition(deepspeed, model, spec, settings, device, replicas, train=False)
    _only_named_leaves(model)
    outputs = ListedOutputs(model, units.gathered)
    with start.quiet():
        engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False, mpu=replicas)
    if replicas is not None:
        clear_mpu()
    hooks = _casting(model, spec.precision, units) + outputs.restore()
    frozen = FrozenStage3(spec, engine)
    return ZeroModel(frozen, device, hooks, _of_parameters(frozen))


def _trained(
    deepspeed: ModuleType,
    model: nn.Module,
    spec: ZeroSpec,
    zero: type[ZeroOptimizer],
    device: torch.device,
    units: ModelUnits,
    optimizer: OptimizerBuilder,
    replicas: Replicas | None,
) -> ShardedModel:
    """A model and its updates, at any stage."""
    settings, precision = copy.deepcopy(spec.native), spec.precision
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    listed: ListedOutputs | None = None
    if zero.gathers:
        materialization.use_placeholders(
            model.parameters(), device
        )  # optimizers refuse the meta device and shards' shapes
        inner = InnerOptimizer(optimizer(named))
        originals = partitioning.partition(deepspeed, model, spec, settings, device, replicas, train=True)
        _only_named_leaves(model)
        listed = ListedOutputs(model, units.gathered)
    else:
        broadcast(materialization.materialize([*model.parameters(), *model.buffers()], device))
        make_dense(model.parameters())  # DeepSpeed broadcasts their memory again, without a look at strides
        inner = InnerOptimizer(optimizer(named))
        # DeepSpeed replaces the parameters' data by 16-bit tensors and rounds the master weights; these are the fp32
        # tensors, not copies.
        originals = (
            [(parameter, parameter.data) for _, parameter in named] if precision.compute != precision.master else []
        )
    client = kept_fp32.after_cast(model, inner.optimizer)
    with start.quiet(), zero.building(model, inner):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=client, config=settings, dist_init_required=False, mpu=replicas
        )
    built = zero(spec, engine, inner)
    if replicas is not None:
        clear_mpu()
        built.average_between(replicas.get_model_parallel_group())
    with torch.no_grad():
        hooks = built.restore_fp32_weights(originals)
    hooks += _casting(model, precision, units) + ([] if listed is None else listed.restore())
    return _with_updates(built, device, hooks, units)


def _with_updates(
    zero: ZeroOptimizer, device: torch.device, hooks: list[RemovableHandle], units: ModelUnits
) -> ShardedModel:
    """Give a model the cases of its run, and what trains it. Collective."""
    model, inner = zero.engine.module, zero.inner
    inside = [each for unit in units.conditional for each in unit.module.parameters()]
    optional = [
        *dict.fromkeys(each for each in (*inside, *filter(is_replicated, model.parameters())) if each.requires_grad)
    ]
    names = [unit.name for unit in units.gathered]
    entered = entered_modules(model, names, [unit.name for unit in units.conditional])
    cases: list[ZeroCase] = []
    if units.conditional or optional:
        cases.append(ConditionalModules(zero, units.conditional, names, entered, optional))
    if getattr(inner.optimizer, "steps_late", False) and zero.calls_in_update() > 1:
        cases.append(LateSteps(zero))
    cases += _of_parameters(zero)
    missing: Sequence[PrivateApi] = ()
    if zero.stale():
        stale = StaleGradients(zero)
        missing = stale.missing
        cases.append(stale)
    skippable = inner.trained if zero.fills_gradients else optional
    sharded = ZeroModel(zero, device, hooks, cases, entered)
    sharded.updates = ZeroUpdates(sharded, zero, skippable=skippable, missing=missing)
    return sharded


def _of_parameters(zero: ZeroParameters) -> list[ZeroCase]:
    """The cases of a model's parameters, with training or without. Collective."""
    model: nn.Module = zero.engine.module
    cases: list[ZeroCase] = []
    if persistent := [each for each in model.parameters() if is_replicated(each) and is_partitioned(each)]:
        cases.append(PersistentParameters(zero.optimizer, model, persistent))
    if zero.spec.second_copies:
        cases.append(SecondCopies(zero))
    for case in cases:
        case.partitioned()
    return cases


def _only_named_leaves(model: nn.Module) -> None:
    """Give each module its own flag: a wrapper that passes attributes on, as those of peft, would show that of a leaf
    inside it.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in model.modules():
        set_z3_leaf_module(module, False)


def _casting(model: nn.Module, precision: Precision, units: ModelUnits) -> list[RemovableHandle]:
    """Register hooks that cast the inputs of the root and of the units."""
    return cast_inputs([model, *(unit.module for unit in units.casting)], precision)
