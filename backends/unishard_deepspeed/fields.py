"""What fields of the config become in DeepSpeed's JSON."""

from __future__ import annotations

from typing import Any

from unishard.config import Config
from unishard.config.shard_groups import shard_group_size
from unishard.config.sharding import ZERO_STAGES
from unishard.config.topology import Topology

UNLIMITED = 10**15
"""Elements; more than any model has."""


KEPT_OFFLOADED = (
    "DeepSpeed 0.19.8 would round what is kept, because it offloads in the dtype of compute; set offload.{place} to "
    "none, precision.keep_fp32 to [], or choose another backend"
)
"""Why nothing is kept in fp32 that is offloaded."""


def stage_of_strategy(cfg: Config) -> int:
    """ZeRO stage that shards what the strategy names, of one group where there are groups."""
    return ZERO_STAGES.index(cfg.sharding.within_group)


def runs_as_stage_2(cfg: Config) -> bool:
    """`shard_optimizer` in bf16: DeepSpeed has another optimizer for stage 1 there, which makes the same updates and
    keeps whole fp32 gradients (DeepSpeed 0.19.8, runtime/bf16_optimizer.py).
    """
    return stage_of_strategy(cfg) == 1 and cfg.precision.compute == "bf16"


def stage(cfg: Config) -> int:
    """ZeRO stage that unishard runs, of one group where there are groups."""
    return 2 if runs_as_stage_2(cfg) else stage_of_strategy(cfg)


def bare(cfg: Config) -> bool:
    """Stage 0 runs the torch optimizer on the model's own parameters (DeepSpeed 0.19.8, runtime/engine.py,
    _configure_optimizer).
    """
    return stage(cfg) == 0 and cfg.precision.compute == cfg.precision.master


def wide(cfg: Config) -> bool:
    """Gradients are added up in a wider format than they are computed in."""
    return cfg.precision.accumulate != cfg.precision.compute


def whole_gradients(cfg: Config) -> bool:
    """Stage 1 adds up in fp32 in whole gradients, `grad_accum` (DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py)."""
    return stage(cfg) == 1 and wide(cfg)


def zero(**settings: Any) -> dict[str, Any]:
    """Settings of the block `zero_optimization`."""
    return {"zero_optimization": settings}


def ahead(cfg: Config, next_unit: int = UNLIMITED) -> int:
    """Elements that are gathered ahead at stage 3; for the next unit a number that `prepare` replaces by those of the
    largest unit.
    """
    size = cfg.communication.prefetch_bucket_size
    return next_unit if size is None else size


def gathering(cfg: Config, topology: Topology) -> dict[str, Any]:
    """How long parameters stay gathered at stage 3."""
    if stage(cfg) != 3:
        return {}
    if not cfg.sharding.reshard_after_forward:
        return zero(stage3_max_live_parameters=UNLIMITED, stage3_max_reuse_distance=UNLIMITED)
    # Only prefetching reads max_live_parameters; releasing reads max_reuse_distance alone
    # (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py).
    return zero(stage3_max_live_parameters=ahead(cfg), stage3_max_reuse_distance=0)


def in_group(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Ranks that keep a second copy of what forward has gathered; a number that is not smaller than the group means all
    of it.
    """
    group = cfg.sharding.reshard_group
    if stage(cfg) != 3 or group is None or group >= shard_group_size(cfg, topology):
        return {}
    return zero(zero_hpz_partition_size=group)


def units(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Modules that are gathered together."""
    # Written at every stage: DeepSpeed's default names the blocks of some mixtures of experts
    # (runtime/zero/leaf_module_config.py).
    classes = list(cfg.sharding.units) if stage(cfg) == 3 and cfg.sharding.units != "auto" else []
    return zero(leaf_module={"classes": classes, "names": [], "name_suffixes": []})


def compute(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Format of parameters and activations."""
    # Where DeepSpeed is not to make masters at stage 0, it is configured for fp32 and runs the model in the format that
    # it finds.
    seen = "fp32" if bare(cfg) else cfg.precision.compute
    return {
        "bf16": {"enabled": seen == "bf16"},
        "fp16": {"enabled": seen == "fp16"},
        "data_types": {"param_dtype": seen},
    }


def master(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Whether there are masters, and their format."""
    pure = cfg.precision.pure and not bare(cfg)
    return {"bf16": {"bf16_master_weights_and_grads": pure, "bf16_optimizer_states": pure}}


def accumulate(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Format in which gradients are added up."""
    if stage(cfg) == 0:  # takes no other format here than that of the parameters
        return {"data_types": {"grad_accum_dtype": "fp32" if bare(cfg) else cfg.precision.compute}}
    return {"data_types": {"grad_accum_dtype": cfg.precision.accumulate}}


def offload(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Where parameters are kept."""
    return zero(offload_param=place(cfg.offload.params, pinned=cfg.offload.pin_memory and cfg.offload.params == "cpu"))


def offload_optimizer(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Where the optimizer state is kept."""
    return zero(offload_optimizer=place(cfg.offload.optimizer, pinned=cfg.offload.pin_memory))


def place(device: str, *, pinned: bool) -> dict[str, Any] | None:
    """One kind of offload, None for none: what lies in files is host memory to DeepSpeed."""
    if device == "none":
        return None
    return {"device": "cpu", "pin_memory": pinned}


def global_batch(cfg: Config, topology: Topology) -> dict[str, Any]:
    """Samples of one update, as DeepSpeed counts them."""
    training = cfg.training
    ranks = shard_group_size(cfg, topology) if cfg.sharding.hybrid else topology.world_size
    return {"train_batch_size": training.micro_batch_size * training.gradient_accumulation_steps * ranks}
