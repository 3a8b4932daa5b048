"""From a model and the translated JSON to a running DeepSpeed engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from unishard.backend import OptimizerBuilder
from unishard.config import Config, Sharding
from unishard.engine.replica import broadcast
from unishard.engine.units import find_units, find_whole
from unishard.process_group import device_of
from unishard.topology import Topology
from unishard_deepspeed import inputs, internals, start
from unishard_deepspeed.engine import DeepSpeedTrainingEngine
from unishard_deepspeed.replicas import replicas_of
from unishard_deepspeed.whole import WholeUnits

__all__ = ["adapted", "build"]


def build(
    model: nn.Module, cfg: Config, native: dict[str, Any], topology: Topology, units: Sequence[str], optimizer: OptimizerBuilder
) -> DeepSpeedTrainingEngine:
    """Shard a model in place and build its engine. Collective.

    Args:
        model: Whole, fp32; rank 0's parameters and buffers count.
        cfg: What to run.
        native: The JSON for `deepspeed.initialize`, not changed.
        topology: The ranks. The process group is up.
        units: Names of the modules that are gathered on their own at stage 3.
        optimizer: Builds the optimizer from the named trainable parameters.
    """
    deepspeed = start.load(topology)
    start.require_files(cfg)
    device = device_of(topology)
    model.to(device)
    broadcast([*model.parameters(), *model.buffers()])
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    # DeepSpeed puts bf16 tensors into the parameters and rounds the masters with them; these are the fp32 weights, not copies.
    originals = [(parameter, parameter.data) for _, parameter in named] if cfg.precision.compute == "bf16" else []
    left_out = find_whole(model, cfg.sharding)
    settings, client_optimizer = adapted(native, model, units), optimizer(named)
    # Without sharding there are no units; the FSDP backend then casts at the default ones, which its `replicate` reduces by.
    replicated = Sharding(whole_units=cfg.sharding.whole_units)
    casting = units if cfg.sharding.strategy != "no_shard" else [unit.name for unit in find_units(model, replicated)]
    keeping = internals.keeping_groups(client_optimizer) if native["zero_optimization"]["stage"] else nullcontext()
    replicas = replicas_of(cfg, topology, device.type)
    with start.hushed(), keeping:
        engine, *_ = deepspeed.initialize(model=model, optimizer=client_optimizer, config=settings, dist_init_required=False, mpu=replicas)
    if replicas is not None:
        internals.forget_groups()
        internals.average_between_groups(engine.optimizer, replicas.get_model_parallel_group())
    internals.undo_first_step(engine.optimizer)
    internals.set_masters(engine.optimizer, originals)
    whole = WholeUnits(engine, left_out, units)
    internals.reduce_units_by_parameter(engine.optimizer)
    whole.reduce_last()
    hooks = inputs.cast_to_bf16(model, casting) if cfg.precision.compute == "bf16" else []
    return DeepSpeedTrainingEngine(cfg, engine, device, hooks, whole)


def adapted(native: dict[str, Any], model: nn.Module, units: Sequence[str]) -> dict[str, Any]:
    """The JSON with what only the model and the machine can say: names of units, sizes, whether memory can be page-locked."""
    native = copy.deepcopy(native)
    zero = native["zero_optimization"]
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    zero["reduce_bucket_size"] = min(zero["reduce_bucket_size"], trainable)
    if zero["stage"] == 3:
        zero["leaf_module"] = {"classes": [], "names": list(units), "name_suffixes": []}
    if zero.get("stage3_max_live_parameters") and not zero["stage3_max_reuse_distance"]:
        largest = _largest_unit(model, units)
        zero["stage3_max_live_parameters"] = largest + min(largest, zero["stage3_max_live_parameters"])
    if not torch.cuda.is_available():
        for place in (zero["offload_param"], zero["offload_optimizer"]):
            if place:
                place["pin_memory"] = False
    return native


def _largest_unit(model: nn.Module, units: Sequence[str]) -> int:
    """Most elements that are gathered together; what lies in no unit counts as one."""
    sizes = [sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) for name in units]
    return max([*sizes, sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)])
