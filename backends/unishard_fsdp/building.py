"""From a whole model and the native config to a running engine."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from unishard import process_group
from unishard.backend import Engine, OptimizerBuilder
from unishard.config import Config, Sharding
from unishard.engine.units import Unit, find_units, find_whole
from unishard.topology import Topology
from unishard_fsdp import options, sharding
from unishard_fsdp.engine import DDPEngine, FSDPEngine
from unishard_fsdp.internals import FixedBuckets, count_as_stepped
from unishard_fsdp.untrained import FSDPUntrainedEngine
from unishard_fsdp.whole import WholeParameters

__all__ = ["build"]


def build(
    model: nn.Module,
    cfg: Config,
    native: options.Options,
    topology: Topology,
    units: Sequence[Unit],
    optimizer: OptimizerBuilder | None,
) -> Engine:
    """Shard a model in place and build its engine. Collective.

    The optimizer is built last: `fully_shard` replaces the parameters by their shards.
    """
    device = process_group.device_of(topology)
    if optimizer is None:
        sharding.apply_fully_shard(model, units, device, cast(options.FullyShard, native), frozen=cfg)
        return FSDPUntrainedEngine(cfg, model, device)
    if isinstance(native, options.DistributedDataParallel):
        sharding.load(model, (), device)
        if native.whole_units:
            # A rank that happens to have used all of them in a step is no sign that it always will (torch 2.13, reducer.cpp).
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified", UserWarning)
        wrap = partial(
            FixedBuckets,
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            init_sync=False,  # `load` has sent everything
            bucket_cap_mb=cast(int, native.bucket_cap_mb),  # torch 2.13 multiplies it by 2**20 and rounds
            find_unused_parameters=native.find_unused_parameters or bool(native.whole_units),
            static_graph=native.static_graph,
            gradient_as_bucket_view=native.gradient_as_bucket_view,
            forward_sync_buffers=native.forward_sync_buffers,
        )
        built = optimizer(_named(model))
        if not native.zero_redundancy_optimizer:
            return DDPEngine(cfg, model, built, device, native=native, wrap=wrap)
        built = _in_parts(built)
        owned = [parameter for group in built.optim.param_groups for parameter in group["params"]]
        return DDPEngine(cfg, model, built, device, native=native, wrap=wrap, owned=owned)
    left_out = find_whole(model, cfg.sharding)
    if isinstance(native, options.Replicate):
        sharding.apply_replicate(model, find_units(model, Sharding(whole_units=cfg.sharding.whole_units)), device, native)
    else:
        sharding.apply_fully_shard(model, units, device, native)
    whole = WholeParameters([parameter for unit in left_out for parameter in unit.module.parameters()], device)
    return FSDPEngine(cfg, model, optimizer(_named(model)), device, native=native, root=cast(FSDPModule, model), whole=whole)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _in_parts(optimizer: Any) -> Any:
    """A ZeroRedundancyOptimizer around a copy of an optimizer that has no state yet, on this rank's parameters."""
    with warnings.catch_warnings():
        # Importing it runs code that nobody here uses through torch's own deprecated torch.jit (torch 2.13).
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def part(groups: list[dict[str, Any]], **unused: Any) -> Any:
        own = object.__new__(type(optimizer))
        vars(own).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
        vars(own).pop("step", None)  # a scheduler has put one there that is bound to `optimizer`
        return own

    count_as_stepped(optimizer)
    # The very dicts of the groups, so that a scheduler made on the optimizer goes on writing the learning rates of this one.
    return ZeroRedundancyOptimizer(list(optimizer.param_groups), optimizer_class=part)  # type: ignore[arg-type]  # torch only calls it
