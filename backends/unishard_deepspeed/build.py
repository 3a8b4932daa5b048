"""Build an adapter from a model and the translated JSON."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.adapter import InferenceAdapter
from unishard.contract.backend import OptimizerBuilder
from unishard.contract.units import ModelUnits
from unishard.distributed.broadcast import broadcast, make_dense
from unishard.distributed.process_group import device_of
from unishard.engine.model import materialization
from unishard.engine.model.input_casts import cast_inputs
from unishard.engine.model.kept_fp32 import holds
from unishard_deepspeed import kept, sharding, start
from unishard_deepspeed.adapter import DeepSpeedAdapter
from unishard_deepspeed.conditional import ConditionalModules
from unishard_deepspeed.fields import UNLIMITED
from unishard_deepspeed.fp32_weights import restore_fp32_weights
from unishard_deepspeed.inference import DeepSpeedInferenceAdapter
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.private.building import allow_fp16, buffers_by_dtype, clear_mpu, keep_adagrad
from unishard_deepspeed.private.optimizer_kind import kind_of, require_for
from unishard_deepspeed.private.reduction import reduce_in_fp32, reduce_units_by_parameter
from unishard_deepspeed.private.second_copy import drop_second_copies, own_group
from unishard_deepspeed.private.updates import average_between_groups
from unishard_deepspeed.replica_groups import Replicas, replicas_of
from unishard_deepspeed.second_copy import group_of

__all__ = ["build", "completed"]


def build(
    model: nn.Module,
    cfg: Config,
    native: dict[str, Any],
    topology: Topology,
    units: ModelUnits,
    optimizer: OptimizerBuilder | None,
) -> InferenceAdapter:
    """Shard a model in place and put an adapter around its engine. Collective.

    Args:
        model: Full on rank 0, trainable parameters in `precision.master`; rank 0's parameters and buffers are used.
        cfg: The config.
        native: The JSON for `deepspeed.initialize`, not changed.
        topology: The ranks. The process group is up.
        units: The gathered units, which are the leaf modules of stage 3; modules that cast their inputs; conditional
            modules.
        optimizer: Builds the optimizer from the named trainable parameters; None for inference at stage 3.
    """
    kept.check(model, cfg)
    deepspeed = start.load(topology)
    start.require_files(cfg)
    device, names = device_of(topology), [unit.name for unit in units.gathered]
    settings, replicas = completed(native, model, names), replicas_of(cfg, topology, device.type)
    copies = group_of(settings["zero_optimization"], topology.world_size) is not None
    require_for(
        cfg, device.type, trains=optimizer is not None, units=bool(names), groups=replicas is not None, copies=copies
    )
    if not copies:
        settings["zero_optimization"]["zero_hpz_partition_size"] = 1
        return _build(deepspeed, model, cfg, settings, device, units, optimizer, replicas)
    with own_group():
        adapter = _build(deepspeed, model, cfg, settings, device, units, optimizer, replicas)
    drop_second_copies(model.parameters())  # as after an update
    return adapter


def _build(
    deepspeed: ModuleType,
    model: nn.Module,
    cfg: Config,
    settings: dict[str, Any],
    device: torch.device,
    units: ModelUnits,
    optimizer: OptimizerBuilder | None,
    replicas: Replicas | None,
) -> InferenceAdapter:
    precision, kind, names = cfg.precision, kind_of(cfg), [unit.name for unit in units.gathered]
    if precision.compute == "fp16":
        allow_fp16()
    if optimizer is None:
        sharding.partition(deepspeed, model, cfg, settings, device, replicas, train=False)
        _only_named_leaves(model)
        with start.quiet():
            engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False, mpu=replicas)
        if replicas is not None:
            clear_mpu()
        return DeepSpeedInferenceAdapter(engine, device, _casting(model, cfg, units))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if kind == "stage-3":
        materialization.use_placeholders(
            model.parameters(), device
        )  # optimizers refuse the meta device and shards' shapes
        inner = InnerOptimizer(optimizer(named))
        originals = sharding.partition(deepspeed, model, cfg, settings, device, replicas, train=True)
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
    if kind == "stage-0":
        settings["gradient_clipping"] = 0.0  # its norm is discarded or of rounded gradients; see TorchClipping
    client, keeps = kept.after_cast(model, inner.optimizer), any(holds(parameter) for parameter in inner.trained)
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
    hooks = restore_fp32_weights(cfg, inner, originals) + _casting(model, cfg, units)
    conditional = ConditionalModules(engine, units.conditional, names, kind)
    if kind == "stage-3":
        reduce_units_by_parameter(engine.optimizer, inner.trained)
    conditional.reduce_last()
    return DeepSpeedAdapter(cfg, engine, inner, device, hooks, conditional)


def _only_named_leaves(model: nn.Module) -> None:
    """Give each module its own flag: a wrapper that passes attributes on, as those of peft, would show that of a leaf
    inside it.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in model.modules():
        set_z3_leaf_module(module, False)


def _casting(model: nn.Module, cfg: Config, units: ModelUnits) -> list[RemovableHandle]:
    """Register hooks that cast the inputs of the root and of the units."""
    return cast_inputs([model, *(unit.module for unit in units.casting)], cfg.precision)


def completed(native: dict[str, Any], model: nn.Module, units: Sequence[str]) -> dict[str, Any]:
    """Add to the JSON what depends on the model and the machine: names of units, sizes, whether memory can be
    pinned.
    """
    native = copy.deepcopy(native)
    zero = native["zero_optimization"]
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    zero["reduce_bucket_size"] = max(1, min(zero["reduce_bucket_size"], trainable))
    if zero["stage"] == 3:
        zero["leaf_module"] = {"classes": [], "names": list(units), "name_suffixes": []}
        largest = _largest_unit(model, units)
        if zero["stage3_prefetch_bucket_size"] == UNLIMITED:
            zero["stage3_prefetch_bucket_size"] = largest
        if zero["stage3_max_live_parameters"] and not zero["stage3_max_reuse_distance"]:
            zero["stage3_max_live_parameters"] = largest + min(largest, zero["stage3_max_live_parameters"])
    if not torch.cuda.is_available():
        for place in (zero["offload_param"], zero["offload_optimizer"]):
            if place:
                place["pin_memory"] = False
    return native


def _largest_unit(model: nn.Module, units: Sequence[str]) -> int:
    """The largest number of elements gathered together; parameters outside units count as one unit."""
    sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in units]
    return max([*sizes, sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)])
