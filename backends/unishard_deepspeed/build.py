"""Build an adapter from a model and the translated JSON."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import ModuleType
from typing import cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Precision
from unishard.contract.adapter import InferenceAdapter
from unishard.contract.backend import OptimizerBuilder
from unishard.contract.kit import materialization
from unishard.contract.kit.input_casts import cast_inputs
from unishard.contract.kit.kept_fp32 import is_kept
from unishard.contract.plan import RunPlan
from unishard.contract.units import ModelUnits
from unishard.distributed.broadcast import broadcast, make_dense
from unishard.distributed.devices import device_of
from unishard_deepspeed import kept_fp32, sharding, start
from unishard_deepspeed.adapter import DeepSpeedAdapter
from unishard_deepspeed.conditional import ConditionalModules
from unishard_deepspeed.fp32_weights import restore_fp32_weights
from unishard_deepspeed.inference import DeepSpeedInferenceAdapter
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.persistent_parameters import PersistentParameters
from unishard_deepspeed.private.building import allow_fp16, buffers_by_dtype, clear_mpu, keep_adagrad
from unishard_deepspeed.private.reduction import reduce_in_fp32, reduce_units_by_parameter
from unishard_deepspeed.private.requirements import require_for
from unishard_deepspeed.private.second_copy import drop_second_copies, own_group
from unishard_deepspeed.private.updates import average_between_groups
from unishard_deepspeed.replicas import Replicas, replicas_of
from unishard_deepspeed.spec import ZeroSpec
from unishard_deepspeed.unit_outputs import ListedOutputs


def build(model: nn.Module, plan: RunPlan) -> InferenceAdapter:
    """Shard a model in place and put an adapter around its engine. Collective.

    Args:
        model: Full on rank 0, trainable parameters in `precision.master`; rank 0's parameters and buffers are used.
        plan: Its units are the leaf modules of stage 3. Without an optimizer it is inference at stage 3.
    """
    spec, units = cast(ZeroSpec, plan.engine), plan.model.units
    kept_fp32.check(model, spec)
    deepspeed = start.load(plan.topology)
    if spec.params_in_files:
        start.require_files(spec.precision.compute)
    device = device_of(plan.topology)
    require_for(spec, device.type, trains=plan.optimizer is not None, units=bool(units.gathered))
    replicas = None if spec.replicas is None else replicas_of(spec.replicas, device.type)
    if not spec.second_copies:
        return _build(deepspeed, model, spec, device, units, plan.optimizer, replicas)
    with own_group():
        adapter = _build(deepspeed, model, spec, device, units, plan.optimizer, replicas)
    drop_second_copies(model.parameters())  # as after an update
    return adapter


def _build(
    deepspeed: ModuleType,
    model: nn.Module,
    spec: ZeroSpec,
    device: torch.device,
    units: ModelUnits,
    optimizer: OptimizerBuilder | None,
    replicas: Replicas | None,
) -> InferenceAdapter:
    settings = copy.deepcopy(spec.native)
    precision, kind, names = spec.precision, spec.kind, [unit.name for unit in units.gathered]
    if precision.compute == "fp16":
        allow_fp16()
    if optimizer is None:
        sharding.partition(deepspeed, model, spec, settings, device, replicas, train=False)
        _only_named_leaves(model)
        outputs = ListedOutputs(model, units.gathered)
        with start.quiet():
            engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False, mpu=replicas)
        if replicas is not None:
            clear_mpu()
        hooks = _casting(model, precision, units) + outputs.restore()
        replicated = PersistentParameters(engine.optimizer, model, "stage-3")
        replicated.gather()
        return DeepSpeedInferenceAdapter(engine, device, hooks, replicated)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if kind == "stage-3":
        materialization.use_placeholders(
            model.parameters(), device
        )  # optimizers refuse the meta device and shards' shapes
        inner = InnerOptimizer(optimizer(named))
        originals = sharding.partition(deepspeed, model, spec, settings, device, replicas, train=True)
        _only_named_leaves(model)
    else:
        materialization.materialize([*model.parameters(), *model.buffers()], device)
        broadcast([*model.parameters(), *model.buffers()])
        make_dense(model.parameters())  # DeepSpeed broadcasts their memory again, without a look at strides
        inner = InnerOptimizer(optimizer(named))
        # DeepSpeed replaces the parameters' data by 16-bit tensors and rounds the master weights; these are the fp32
        # tensors, not copies.
        originals = (
            [(parameter, parameter.data) for _, parameter in named] if precision.compute != precision.master else []
        )
    client, keeps = (
        kept_fp32.after_cast(model, inner.optimizer),
        any(is_kept(parameter) for parameter in inner.trained),
    )
    listed = ListedOutputs(model, units.gathered) if kind == "stage-3" else None
    with ExitStack() as building:
        building.enter_context(start.quiet())
        if kind != "stage-0":
            building.enter_context(keep_adagrad(inner.optimizer))
        if keeps and kind == "stage-3":
            building.enter_context(buffers_by_dtype())
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=client, config=settings, dist_init_required=False, mpu=replicas
        )
    if keeps and kind == "stages-1-2":
        reduce_in_fp32(engine.optimizer)
    if replicas is not None:
        clear_mpu()
        average_between_groups(engine.optimizer, replicas.get_model_parallel_group(), kind)
    hooks = restore_fp32_weights(spec, inner, originals) + _casting(model, precision, units)
    hooks += [] if listed is None else listed.restore()
    replicated = PersistentParameters(engine.optimizer, model, kind)
    conditional = ConditionalModules(engine, units.conditional, names, kind, replicated.trained)
    if kind == "stage-3":
        reduce_units_by_parameter(engine.optimizer, inner.trained)
    conditional.reduce_last()
    replicated.gather()
    return DeepSpeedAdapter(spec, engine, inner, device, hooks, conditional, replicated)


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
