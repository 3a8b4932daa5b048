"""The table: what DeepSpeed 0.19.8 makes of each field of the config, and the keys that no field decides."""

from __future__ import annotations

from typing import Any

from unishard.config import Config
from unishard.grouping import parts
from unishard.rules import Fit, Rule, When, idle, loop
from unishard.topology import Topology

__all__ = ["CONSTANTS", "RULES"]

_STAGES = {"no_shard": 0, "shard_optimizer": 1, "shard_grad_op": 2, "full_shard": 3}

UNLIMITED = 10**15
"""Elements; more than any model has."""


def _stage(cfg: Config) -> int:
    return _STAGES[cfg.sharding.within_group]


def _replicated_bf16(cfg: Config) -> bool:
    return _stage(cfg) == 0 and cfg.precision.compute == "bf16"


def _whole_gradients(cfg: Config) -> bool:
    """DeepSpeed's BF16_Optimizer runs (DeepSpeed 0.19.8, runtime/engine.py, _do_optimizer_sanity_check)."""
    return _stage(cfg) == 1 and cfg.precision.compute == "bf16" and cfg.offload.optimizer == "none"


def _zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


def _gathering(cfg: Config, topology: Topology) -> dict[str, Any]:
    if _stage(cfg) != 3:
        return {}
    if not cfg.sharding.reshard_after_forward:
        return _zero(stage3_max_live_parameters=UNLIMITED, stage3_max_reuse_distance=UNLIMITED)
    # Only prefetching reads max_live_parameters; releasing reads max_reuse_distance alone
    # (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py).
    return _zero(stage3_max_live_parameters=cfg.communication.prefetch_bucket_size, stage3_max_reuse_distance=0)


def _units(cfg: Config, topology: Topology) -> dict[str, Any]:
    # Written at every stage: DeepSpeed's default names the blocks of some mixtures of experts (runtime/zero/leaf_module_config.py).
    classes = list(cfg.sharding.units) if _stage(cfg) == 3 and cfg.sharding.units != "auto" else []
    return _zero(leaf_module={"classes": classes, "names": [], "name_suffixes": []})


def _compute(cfg: Config, topology: Topology) -> dict[str, Any]:
    bf16 = cfg.precision.compute == "bf16"
    accumulate = "bf16" if _replicated_bf16(cfg) else "fp32"
    return {"bf16": {"enabled": bf16}, "data_types": {"param_dtype": cfg.precision.compute, "grad_accum_dtype": accumulate}}


def _offload(cfg: Config, topology: Topology) -> dict[str, Any]:
    return _zero(offload_param=_place(cfg, cfg.offload.params))


def _offload_optimizer(cfg: Config, topology: Topology) -> dict[str, Any]:
    return _zero(offload_optimizer=_place(cfg, cfg.offload.optimizer))


def _place(cfg: Config, device: str) -> dict[str, Any] | None:
    if device == "none":
        return None
    place = {"device": device, "pin_memory": cfg.offload.pin_memory}
    return place | ({"nvme_path": cfg.offload.nvme_path} if device == "nvme" else {})


def _global_batch(cfg: Config, topology: Topology) -> dict[str, Any]:
    training = cfg.training
    ranks = parts(cfg, topology) if cfg.sharding.hybrid else topology.world_size
    return {"train_batch_size": training.micro_batch_size * training.gradient_accumulation_steps * ranks}


_NOT_STAGE_3 = "has no meaning below stage 3, where each rank holds whole parameters"
_TORCH_OPTIMIZER = "unishard builds the optimizer and passes it in; ZeRO hands it flat fp32 partitions, the same maths element by element"


_BETWEEN = (
    "unishard averages each rank's part of the gradients over the groups at the end of a window, after the last backward instead of "
    "beside it (MiCS, which did that, has left DeepSpeed 0.19.8; hpZ still divides optimizer and gradients between all ranks)"
)


def _optimizer_field() -> Rule:
    return Rule(Fit.EXACT, "client optimizer", _TORCH_OPTIMIZER)


def _groups_field() -> Rule:
    return Rule(Fit.EXACT, "groups of the client optimizer", "ZeRO flattens each group on its own, so that no partition mixes two")


RULES: dict[str, Rule] = {
    "backend": loop("chooses this table"),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "zero_optimization.stage",
        "stage 3",
        to=lambda cfg, topology: _zero(stage=_stage(cfg)),
        when=(
            When("no_shard", lambda cfg: _stage(cfg) == 0, Fit.EXACT, "stage 0: one all-reduce for each update"),
            When(
                "shard_optimizer in bf16",
                _whole_gradients,
                Fit.EQUIVALENT,
                "stage 1; DeepSpeed keeps whole fp32 gradients beside the bf16 ones (4 more bytes for each parameter) and all-reduces them",
            ),
            When(
                "shard_optimizer",
                lambda cfg: _stage(cfg) == 1,
                Fit.EQUIVALENT,
                "stage 1; gradients travel by all-reduce instead of reduce-scatter",
            ),
            When(
                "hybrid_shard",
                lambda cfg: cfg.sharding.strategy == "hybrid_shard",
                Fit.EQUIVALENT,
                f"stage 3 in each group; {_BETWEEN}",
            ),
            When(
                "hybrid_shard_grad_op",
                lambda cfg: cfg.sharding.strategy == "hybrid_shard_grad_op",
                Fit.EQUIVALENT,
                f"stage 2 in each group, where gradients travel by all-reduce instead of reduce-scatter; {_BETWEEN}",
            ),
            When(
                "shard_grad_op",
                lambda cfg: _stage(cfg) == 2,
                Fit.EQUIVALENT,
                "stage 2; gradients travel by all-reduce instead of reduce-scatter",
            ),
        ),
    ),
    "sharding.group_size": Rule(
        Fit.EXACT,
        "deepspeed.initialize(mpu=...)",
        "not in the JSON: prepare gives ZeRO the ranks of a group as its data-parallel group; ranks in a row form a group",
        when=(idle("strategy is not hybrid", lambda cfg: not cfg.sharding.hybrid, "all ranks share one copy"),),
    ),
    "sharding.reshard_after_forward": Rule(
        Fit.EXACT,
        "zero_optimization.stage3_max_reuse_distance, stage3_max_live_parameters",
        "each unit is gathered for its forward and again for its backward; false: everything stays gathered until its backward",
        to=_gathering,
        when=(
            idle("strategy is not full_shard", lambda cfg: _stage(cfg) != 3, _NOT_STAGE_3),
            When(
                "true with prefetching",
                lambda cfg: cfg.sharding.reshard_after_forward and cfg.communication.prefetch_bucket_size > 0,
                Fit.EQUIVALENT,
                "prepare lets at most two of the largest unit be gathered at once, so prefetching stays one unit ahead; what was "
                "prefetched for backward when forward ends is not gathered again. communication.prefetch_bucket_size 0 drops everything",
            ),
        ),
    ),
    "sharding.units": Rule(
        Fit.EXACT,
        "zero_optimization.leaf_module",
        "prepare writes the units' names in the model; they are gathered as leaf modules, and their gradients are reduced as they come",
        to=_units,
        when=(idle("strategy is not full_shard", lambda cfg: _stage(cfg) != 3, _NOT_STAGE_3),),
    ),
    "sharding.min_unit_params": Rule(
        Fit.EXACT,
        "zero_optimization.leaf_module.names",
        "smaller modules are not among the names",
        when=(idle("strategy is not full_shard", lambda cfg: _stage(cfg) != 3, _NOT_STAGE_3),),
    ),
    "sharding.whole_units": Rule(
        Fit.EXACT,
        "none: unishard's own",
        "where a rank did not use a parameter, it adds zeros to the average",
        when=(
            idle("empty", lambda cfg: not cfg.sharding.whole_units, ""),
            When(
                "full_shard",
                lambda cfg: _stage(cfg) == 3,
                Fit.EQUIVALENT,
                "gathered with the leaf module around them; those in none are gathered before each forward and dropped after each "
                "backward, without DeepSpeed's hooks; their gradients stay whole until backward ends",
            ),
            When(
                "shard_grad_op",
                lambda cfg: _stage(cfg) == 2,
                Fit.EQUIVALENT,
                "their gradients stay whole until backward ends, and are then reduced in one order on every rank",
            ),
        ),
    ),
    "precision.compute": Rule(
        Fit.EXACT,
        "bf16.enabled, data_types.param_dtype, data_types.grad_accum_dtype",
        "prepare sets the fp32 masters from the fp32 model (DeepSpeed alone would round them to bf16) and casts floating inputs",
        to=_compute,
        when=(
            When(
                "bf16 with no_shard",
                _replicated_bf16,
                Fit.APPROXIMATE,
                "stage 0 adds up the gradients of a window in bf16; choose shard_optimizer for fp32 accumulation",
            ),
        ),
    ),
    "precision.reduce": Rule(
        Fit.EXACT,
        "communication_data_type",
        "the sum over the ranks is taken in this format",
        to=lambda cfg, topology: {"communication_data_type": cfg.precision.reduce},
        when=(
            When(
                "fp32 with compute bf16 and no_shard",
                lambda cfg: _replicated_bf16(cfg) and cfg.precision.reduce == "fp32",
                Fit.APPROXIMATE,
                "the sum over the ranks is taken in fp32, but stage 0 rounds what goes in and what comes out to bf16; "
                "choose shard_optimizer",
            ),
        ),
    ),
    "offload.params": Rule(
        Fit.EXACT,
        "zero_optimization.offload_param",
        to=_offload,
        when=(
            When(
                "cpu or nvme with offload.optimizer none",
                lambda cfg: cfg.offload.params != "none" and cfg.offload.optimizer == "none",
                Fit.EQUIVALENT,
                "the fp32 masters live with the optimizer, on the device; set offload.optimizer to cpu to move them",
            ),
            When(
                "nvme",
                lambda cfg: cfg.offload.params == "nvme",
                Fit.EQUIVALENT,
                "parts of at least 1 MiB lie in files, smaller ones in host memory",
            ),
        ),
    ),
    "offload.optimizer": Rule(
        Fit.EXACT,
        "zero_optimization.offload_optimizer",
        "the torch optimizer steps on the host; DeepSpeedCPUAdam is not used",
        to=_offload_optimizer,
        when=(
            When(
                "nvme",
                lambda cfg: cfg.offload.optimizer == "nvme",
                Fit.UNSUPPORTED,
                "DeepSpeed 0.19.8 swaps the state of torch's SGD and AdamW through files and then makes other updates than without (losses "
                "differ by 1e-2 and more from the second on); choose cpu",
            ),
        ),
    ),
    "offload.pin_memory": Rule(
        Fit.EXACT,
        "zero_optimization.offload_param.pin_memory, offload_optimizer.pin_memory",
        "prepare writes false where there is no CUDA device, since nothing can be page-locked there",
    ),
    "offload.nvme_path": Rule(
        Fit.EXACT,
        "zero_optimization.offload_param.nvme_path, offload_optimizer.nvme_path",
        "prepare refuses nvme where DeepSpeed's async_io op, which needs libaio, can be neither found nor built",
        when=(idle("null", lambda cfg: cfg.offload.nvme_path is None, ""),),
    ),
    "activation_checkpointing": Rule(
        Fit.EXACT,
        "torch.utils.checkpoint.checkpoint",
        "around `forward`, inside the engine's hooks; without reentrance, and random numbers are drawn again alike",
    ),
    "training.micro_batch_size": Rule(
        Fit.EXACT,
        "train_micro_batch_size_per_gpu",
        to=lambda cfg, topology: {"train_micro_batch_size_per_gpu": cfg.training.micro_batch_size},
    ),
    "training.gradient_accumulation_steps": Rule(
        Fit.EXACT,
        "gradient_accumulation_steps",
        "unishard's loop divides the loss and decides where a window ends (managed_gradient_accumulation is false)",
        to=lambda cfg, topology: {"gradient_accumulation_steps": cfg.training.gradient_accumulation_steps},
    ),
    "training.global_batch_size": Rule(
        Fit.EXACT,
        "train_batch_size",
        "always the product, of one group where there are groups, as DeepSpeed wants it; a stated value is only checked",
        to=_global_batch,
    ),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "gradient_clipping",
        "0.0 for null, since DeepSpeed clips to 1.0 when the key is absent; step(clip_grad_norm=...) sets it for one update",
        to=lambda cfg, topology: {"gradient_clipping": cfg.training.gradient_clipping or 0.0},
        when=(
            When(
                "no_shard in fp32",
                lambda cfg: _stage(cfg) == 0 and cfg.precision.compute == "fp32" and cfg.training.gradient_clipping is not None,
                Fit.EQUIVALENT,
                "stage 0 discards the norm in fp32, so unishard takes it and clips, by torch's formula, after the all-reduce",
            ),
        ),
    ),
    "training.nonfinite": Rule(
        Fit.EXACT,
        "bf16.check_grad_overflow",
        "raise: the update is left out first; ignore: ZeRO, which always leaves it out, is kept from doing so",
        to=lambda cfg, topology: {"bf16": {"check_grad_overflow": cfg.training.nonfinite != "ignore"}},
        when=(
            When(
                "ignore with no_shard in bf16",
                lambda cfg: cfg.training.nonfinite == "ignore" and _replicated_bf16(cfg),
                Fit.UNSUPPORTED,
                "stage 0 in bf16 always leaves out an update that is not finite; write skip or raise, or choose shard_optimizer",
            ),
        ),
    ),
    "training.last_window": loop("divides by the true length of the last window, or leaves it out"),
    "training.seed": loop("seeds the data order, and each rank after prepare"),
    "optimizer.name": _optimizer_field(),
    "optimizer.lr": _optimizer_field(),
    "optimizer.betas": _optimizer_field(),
    "optimizer.eps": _optimizer_field(),
    "optimizer.amsgrad": _optimizer_field(),
    "optimizer.momentum": _optimizer_field(),
    "optimizer.nesterov": _optimizer_field(),
    "optimizer.weight_decay": _optimizer_field(),
    "optimizer.no_decay": _groups_field(),
    "optimizer.groups": _groups_field(),
    "scheduler.name": loop("writes the learning rate of each update into the optimizer's groups"),
    "scheduler.warmup_steps": loop("moves once for each real update"),
    "scheduler.total_steps": loop("moves once for each real update"),
    "scheduler.min_lr_ratio": loop("part of the same formula"),
    "communication.reduce_bucket_size": Rule(
        Fit.EXACT,
        "zero_optimization.reduce_bucket_size",
        "prepare writes no more than the trainable elements, so that the buffer is not larger than the model",
        to=lambda cfg, topology: _zero(reduce_bucket_size=cfg.communication.reduce_bucket_size),
        when=(
            When(
                "no_shard, or shard_optimizer in bf16",
                lambda cfg: _stage(cfg) == 0 or _whole_gradients(cfg),
                Fit.EQUIVALENT,
                "DeepSpeed uses buckets of 500,000,000 elements there",
            ),
        ),
    ),
    "communication.prefetch_bucket_size": Rule(
        Fit.EXACT,
        "zero_optimization.stage3_prefetch_bucket_size",
        "not more than the largest unit where parameters are dropped after forward",
        to=lambda cfg, topology: _zero(stage3_prefetch_bucket_size=cfg.communication.prefetch_bucket_size) if _stage(cfg) == 3 else {},
        when=(idle("strategy is not full_shard", lambda cfg: _stage(cfg) != 3, _NOT_STAGE_3),),
    ),
    "communication.overlap": Rule(
        Fit.EXACT,
        "zero_optimization.overlap_comm",
        to=lambda cfg, topology: _zero(overlap_comm=cfg.communication.overlap and _stage(cfg) >= 2),
        when=(
            When(
                "true with no_shard or shard_optimizer",
                lambda cfg: cfg.communication.overlap and _stage(cfg) < 2,
                Fit.EQUIVALENT,
                "written as false: stages 0 and 1 reduce once, at the end of the window (DeepSpeed refuses overlap_comm there "
                "without managed gradient accumulation)",
            ),
        ),
    ),
    "communication.desync_check": loop("a few bytes over gloo before each collective call; none with one rank"),
    "communication.desync_timeout": loop("seconds of patience of that check"),
    "compile.mode": Rule(
        Fit.EQUIVALENT,
        "torch.compile",
        "of each block's `forward`; DeepSpeed's hooks are not compiled, and DeepCompile is not used",
        when=(
            idle("none", lambda cfg: cfg.compile.mode == "none", ""),
            When(
                "full with full_shard",
                lambda cfg: cfg.compile.mode == "full" and _stage(cfg) == 3,
                Fit.EQUIVALENT,
                "of the root's `forward`, with a graph break at each module that gathers; choose per_block for larger graphs",
            ),
            When("full", lambda cfg: cfg.compile.mode == "full", Fit.EQUIVALENT, "of the root's `forward`"),
        ),
    ),
    "compile.backend": Rule(Fit.EXACT, "torch.compile(backend=...)"),
    "strict": loop("decides about the report of this table"),
    "native": Rule(
        Fit.EXACT,
        "any key",
        "`native.deepspeed` is merged last; each of its keys has a line of its own in the report, approximate if it may change the maths",
    ),
}

CONSTANTS: dict[str, tuple[Any, str]] = {
    "managed_gradient_accumulation": (False, "a call of step is the end of a window, as in torch"),
    "zero_allow_untested_optimizer": (True, "unishard passes the torch optimizer; DeepSpeed only lists the ones it knows"),
    "zero_force_ds_cpu_optimizer": (False, "an offloaded torch optimizer is not replaced by DeepSpeedCPUAdam"),
    "fp16": ({"enabled": False}, "precision.compute has no fp16"),
    "torch_autocast": ({"enabled": False}, "parameters are cast, not operations"),
    "bf16.immediate_grad_update": (False, "gradients are added up after backward"),
    "bf16.bf16_master_weights_and_grads": (False, "masters and accumulated gradients are fp32"),
    "bf16.bf16_optimizer_states": (False, "the optimizer state is fp32"),
    "data_types.buffer_dtype": (None, "buffers keep their dtype"),
    "data_types.keep_in_fp32_modules": ([], "buffers keep their dtype"),
    "gradient_allreduce_op": ("mean", "gradients are averaged over the ranks"),
    "prescale_gradients": (False, "the division happens in one place"),
    "gradient_predivide_factor": (1.0, "the division happens in one place"),
    "steps_per_print": (None, "unishard has its own progress"),
    "wall_clock_breakdown": (False, "would wait for the device in every micro-batch"),
    "memory_breakdown": (False, "would log in every micro-batch"),
    "dump_state": (False, "would log the whole engine"),
    "timers.throughput.enabled": (False, "would wait for the device in every step"),
    "zero_optimization.contiguous_gradients": (True, "gradients are copied into one buffer for each bucket"),
    "zero_optimization.reduce_scatter": (True, "stage 3 reduces to the owner of each part"),
    "zero_optimization.use_multi_rank_bucket_allreduce": (True, "stages 1 and 2: one collective for each bucket"),
    "zero_optimization.allgather_partitions": (True, "updated parameters are gathered by all-gather"),
    "zero_optimization.allgather_bucket_size": (500_000_000, "DeepSpeed's default, elements"),
    "zero_optimization.sub_group_size": (1_000_000_000, "DeepSpeed's default, elements updated at once at stage 3"),
    "zero_optimization.compute_grad_norm": (True, "step reports the norm"),
    "zero_optimization.round_robin_gradients": (False, "corrupts the map from parameters to masters"),
    "zero_optimization.ignore_unused_parameters": (True, "unishard leaves parameters without gradient out of the update"),
    "zero_optimization.stage3_param_persistence_threshold": (0, "stage 3 shards small parameters too"),
    "zero_optimization.memory_efficient_linear": (False, "replaces torch's linear by one that rounds otherwise in bf16"),
    "zero_optimization.zero_hpz_partition_size": (1, "no secondary copy of the parameters"),
}
