"""What `deepspeed.initialize` gets, with what the model and the machine add to it, and what is set up around it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unishard.config import Config, Precision
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.model_shape import ModelShape
from unishard.contract.report import Translation
from unishard_deepspeed.fields import UNLIMITED
from unishard_deepspeed.second_copy import group_of

if TYPE_CHECKING:
    from unishard.contract.units import ModelUnits


@dataclass(frozen=True, slots=True)
class ZeroSpec:
    """An `EngineSpec`."""

    engine: str
    native: Native
    """The JSON, complete."""
    strategy: str
    """`sharding.strategy`, for messages."""
    precision: Precision
    replicas: tuple[int, int] | None
    """Groups that each hold a copy, and the ranks of one; None if all ranks share one copy."""
    second_copies: bool
    """Whether smaller groups of ranks keep a second copy of the parameters."""
    skips: bool
    """Whether an update with a gradient that is not finite is skipped."""
    has_conditional: bool
    """Whether a rank may skip modules."""
    replicates: bool
    """Whether every rank holds some parameters whole that would be sharded, and may skip them."""
    compares_ranks: bool
    """Whether the engine compares which parameters the ranks use."""
    saves: bool
    """Whether the run saves by itself."""

    @property
    def zero(self) -> Native:
        """The block `zero_optimization`."""
        block: Native = self.native["zero_optimization"]
        return block

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer state is offloaded."""
        return bool(self.zero["offload_optimizer"])


def spec_of(
    cfg: Config, translation: Translation, topology: Topology, shape: ModelShape, units: ModelUnits
) -> ZeroSpec:
    """The spec of a config for a model."""
    native, size = completed(translation.native, shape, units), shard_group_size(cfg, topology)
    zero = native["zero_optimization"]
    copies = group_of(zero, topology.world_size) is not None
    if not zero["stage"]:
        native["gradient_clipping"] = 0.0  # its norm is discarded or of rounded gradients; see TorchClipping
    if not copies:
        zero["zero_hpz_partition_size"] = 1
    return ZeroSpec(
        engine=translation.engine,
        native=native,
        strategy=cfg.sharding.strategy,
        precision=cfg.precision,
        replicas=(topology.world_size // size, size) if cfg.sharding.hybrid and size != topology.world_size else None,
        second_copies=copies,
        skips=cfg.training.nonfinite != "ignore",
        has_conditional=bool(cfg.sharding.conditional_modules),
        replicates=bool(cfg.sharding.replicate) and zero["stage"] > 0,
        compares_ranks=cfg.communication.desync_check,
        saves=cfg.checkpoint.automatic or bool(cfg.checkpoint.on_signal),
    )


def completed(native: Native, shape: ModelShape, units: ModelUnits) -> Native:
    """Add to the JSON what depends on the model and the machine: names of units, sizes, whether memory can be
    pinned.
    """
    import torch

    native = copy.deepcopy(native)
    zero: dict[str, Any] = native["zero_optimization"]
    trainable = sum(parameter.numel for parameter in shape.trainable)
    zero["reduce_bucket_size"] = max(1, min(zero["reduce_bucket_size"], trainable))
    if zero["stage"] == 3:
        zero["leaf_module"] = {"classes": [], "names": [unit.name for unit in units.gathered], "name_suffixes": []}
        largest = _largest_unit(shape, units)
        if zero["stage3_prefetch_bucket_size"] == UNLIMITED:
            zero["stage3_prefetch_bucket_size"] = largest
        if zero["stage3_max_live_parameters"] and not zero["stage3_max_reuse_distance"]:
            zero["stage3_max_live_parameters"] = largest + min(largest, zero["stage3_max_live_parameters"])
    if not torch.cuda.is_available():
        for place in (zero["offload_param"], zero["offload_optimizer"]):
            if place:
                place["pin_memory"] = False
    return native


def _largest_unit(shape: ModelShape, units: ModelUnits) -> int:
    """The largest number of elements gathered together; parameters outside units count as one unit."""
    sizes = [unit.numel for unit in units.gathered]
    return max([*sizes, shape.numel - sum(sizes)])
