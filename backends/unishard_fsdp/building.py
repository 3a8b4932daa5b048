"""From a whole model and the native config to a running engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unishard import process_group
from unishard.backend import Engine, OptimizerFactory
from unishard.config import Config, Sharding
from unishard.engine.units import Unit, find_units
from unishard.topology import Topology
from unishard_fsdp import options, sharding
from unishard_fsdp.engine import DDPEngine, FSDPEngine

__all__ = ["build"]


def build(
    model: nn.Module,
    cfg: Config,
    native: options.Options,
    topology: Topology,
    units: Sequence[Unit],
    optimizer: OptimizerFactory,
) -> Engine:
    """Shard a model in place and build its engine. Collective.

    The optimizer is built last: `fully_shard` replaces the parameters by their shards.
    """
    device = process_group.device_of(topology)
    if isinstance(native, options.DistributedDataParallel):
        sharding.load(model, (), device)
        wrap = partial(
            DistributedDataParallel,
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            init_sync=False,  # `load` has sent everything
            bucket_cap_mb=cast(int, native.bucket_cap_mb),  # torch 2.13 multiplies it by 2**20 and rounds
            find_unused_parameters=native.find_unused_parameters,
            static_graph=native.static_graph,
            gradient_as_bucket_view=native.gradient_as_bucket_view,
            forward_sync_buffers=native.forward_sync_buffers,
        )
        built = optimizer(_trainable(model))
        if not native.zero_redundancy_optimizer:
            return DDPEngine(cfg, model, built, device, native=native, wrap=wrap)
        built = _in_parts(built)
        owned = [parameter for group in built.optim.param_groups for parameter in group["params"]]
        return DDPEngine(cfg, model, built, device, native=native, wrap=wrap, owned=owned)
    if isinstance(native, options.Replicate):
        sharding.apply_replicate(model, find_units(model, Sharding()), device, native)
    else:
        sharding.apply_fully_shard(model, units, device, native)
    return FSDPEngine(cfg, model, optimizer(_trainable(model)), device, native=native, root=cast(FSDPModule, model))


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _in_parts(optimizer: Any) -> Any:
    """A ZeroRedundancyOptimizer of the same class and groups as an optimizer that has no state yet."""
    with warnings.catch_warnings():
        # Importing it runs code that nobody here uses through torch's own deprecated torch.jit (torch 2.13).
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer([dict(group) for group in optimizer.param_groups], optimizer_class=type(optimizer))
