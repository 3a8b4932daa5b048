"""The table: what DeepSpeed 0.19.8 makes of each field of the config."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config.nested import merge
from unishard.contract.field_rows import STATE_IN_FILES, WEIGHTS_IN_FILES, exact, row
from unishard.contract.loop_rules import complete
from unishard.contract.rules import Fit, Rule, When, done_by_unishard, unless
from unishard_deepspeed import fields

_GROUPS = Rule(
    Fit.EXACT, "groups of the client optimizer", "ZeRO flattens each group by itself; no partition mixes two"
)
_BELOW_STAGE_3 = unless(
    "strategy is not full_shard",
    lambda cfg: fields.stage(cfg) != 3,
    "has no meaning below stage 3, where each rank holds whole parameters",
)


# The reduction between groups comes after the last backward of a window, not beside it as in MiCS, which DeepSpeed
# 0.19.8 has removed; hpZ still divides optimizer and gradients between all ranks.
_BETWEEN = "in each group; averaged over the groups at the end of a window (no MiCS)"

_KEPT_IN_GROUP = (
    "hpZ: a second copy in each group, kept until the update; the first forward of a window gathers among all ranks"
)

_OWN: Mapping[str, Rule] = {
    "sharding.strategy": row(
        Fit.EXACT,
        "zero_optimization.stage",
        "stage 3",
        unless("no_shard", lambda cfg: fields.stage(cfg) == 0, "stage 0: one all-reduce for each update"),
        When(
            "shard_optimizer in bf16",
            fields.runs_as_stage_2,
            Fit.EQUIVALENT,
            "stage 2: gradients are sharded too, and reduced in each micro-batch, by all-reduce",
        ),
        When(
            "shard_optimizer in fp16, accumulated in fp32",
            fields.whole_gradients,
            Fit.EQUIVALENT,
            "stage 1; all-reduces whole fp32 gradients, 4 more bytes for each parameter",
        ),
        When(
            "shard_optimizer",
            lambda cfg: fields.stage(cfg) == 1,
            Fit.EQUIVALENT,
            "stage 1; gradients travel by all-reduce instead of reduce-scatter",
        ),
        When(
            "hybrid_shard", lambda cfg: cfg.sharding.strategy == "hybrid_shard", Fit.EQUIVALENT, f"stage 3 {_BETWEEN}"
        ),
        When(
            "hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.strategy == "hybrid_shard_grad_op",
            Fit.EQUIVALENT,
            f"stage 2 {_BETWEEN}",
        ),
        When(
            "shard_grad_op",
            lambda cfg: fields.stage(cfg) == 2,
            Fit.EQUIVALENT,
            "stage 2; gradients travel by all-reduce instead of reduce-scatter",
        ),
        to=lambda cfg, topology: fields.zero(stage=fields.stage(cfg)),
    ),
    "sharding.group_size": row(
        Fit.EXACT,
        "deepspeed.initialize(mpu=...)",
        "not in the JSON: consecutive ranks form ZeRO's data-parallel group",
    ),
    "sharding.reshard_after_forward": row(
        Fit.EXACT,
        "zero_optimization.stage3_max_reuse_distance, stage3_max_live_parameters, zero_hpz_partition_size",
        "each unit is gathered for forward and backward; false: kept until its backward",
        When(
            "a number with hybrid_shard",
            lambda cfg: cfg.sharding.reshard_group is not None and cfg.sharding.hybrid,
            Fit.UNSUPPORTED,
            "hpZ divides all ranks, not those of a group; write true or false, or full_shard",
        ),
        When(
            "a number with parallel.expert or parallel.tensor",
            lambda cfg: cfg.sharding.reshard_group is not None and bool(cfg.parallel.slices),
            Fit.UNSUPPORTED,
            "hpZ keeps parts on neighboring ranks, which have different slices; write true or false",
        ),
        When("a number", lambda cfg: cfg.sharding.reshard_group is not None, Fit.EQUIVALENT, _KEPT_IN_GROUP),
        When(
            "true with prefetching",
            lambda cfg: bool(cfg.sharding.reshard_after_forward) and fields.ahead(cfg) > 0,
            Fit.EQUIVALENT,
            "prefetches one unit ahead; communication.prefetch_bucket_size 0 keeps nothing",
        ),
        to=lambda cfg, topology: merge(fields.gathering(cfg, topology), fields.in_group(cfg, topology)),
    ),
    "sharding.units": row(
        Fit.EXACT,
        "zero_optimization.leaf_module",
        "units are leaf modules, by their names in the model; gradients reduced as they come",
        _BELOW_STAGE_3,
        to=fields.units,
    ),
    "sharding.min_unit_params": row(
        Fit.EXACT, "zero_optimization.leaf_module.names", "smaller modules are not among the names", _BELOW_STAGE_3
    ),
    "sharding.conditional_modules": row(
        Fit.EXACT,
        "none: unishard's own",
        "where a rank did not use a parameter, it adds zeros to the average",
        When(
            "full_shard",
            lambda cfg: fields.stage(cfg) == 3,
            Fit.EQUIVALENT,
            "gathered with the leaf module around them; gradients stay whole until backward ends",
        ),
        When(
            "shard_grad_op, or shard_optimizer in bf16",
            lambda cfg: fields.stage(cfg) == 2,
            Fit.EQUIVALENT,
            "gradients stay whole until backward ends, then are reduced in one order",
        ),
    ),
    "sharding.replicate": row(
        Fit.EXACT,
        "none: unishard's own",
        "every rank holds them whole, as every parameter; their master weights are sharded",
        unless(
            "no_shard",
            lambda cfg: fields.stage(cfg) == 0,
            "nothing to replicate: every rank holds every parameter whole",
        ),
        unless(
            "full_shard",
            lambda cfg: fields.stage(cfg) == 3,
            "gathered after each update and not freed until the next; their shards and master weights stay sharded",
        ),
    ),
    "precision.compute": row(
        Fit.EXACT,
        "bf16.enabled, fp16.enabled, data_types.param_dtype",
        "prepare sets fp32 master weights from the unrounded model and casts floating inputs",
        to=fields.compute,
    ),
    "precision.master": row(
        Fit.EXACT,
        "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states",
        "`prepare` casts trainable parameters to it; the optimizer's state follows",
        unless(
            "that of compute with no_shard",
            lambda cfg: cfg.precision.pure and fields.stage(cfg) == 0,
            "no master weights: the torch optimizer steps the model's own parameters",
        ),
        When(
            "fp16 with sharding",
            lambda cfg: cfg.precision.master == "fp16",
            Fit.UNSUPPORTED,
            "needs DeepSpeedCPUAdam; write fp32, or choose no_shard, or compute and master bf16",
        ),
        When(
            "bf16 with offload.optimizer",
            lambda cfg: cfg.precision.master == "bf16" and cfg.offload.optimizer != "none",
            Fit.UNSUPPORTED,
            "needs DeepSpeedCPUAdam; write fp32, or set offload.optimizer to none",
        ),
        to=fields.master,
    ),
    "precision.reduce": row(
        Fit.EXACT,
        "communication_data_type",
        "the sum over the ranks is taken in this dtype",
        to=lambda cfg, topology: {"communication_data_type": cfg.precision.reduce},
    ),
    "precision.accumulate": exact(
        "data_types.grad_accum_dtype",
        unless(
            "fp32 in bf16 or fp16 with no_shard",
            lambda cfg: fields.stage(cfg) == 0 and fields.wide(cfg),
            "stage 0 only takes compute's dtype; torch accumulates in fp32 (Tensor.grad_dtype)",
        ),
        to=fields.accumulate,
    ),
    "precision.cast_inputs": done_by_unishard(
        "hooks on the root and its units; fp16.auto_cast, which casts only inputs of the root, is false"
    ),
    "precision.keep_fp32": row(
        Fit.EXACT,
        "data_types.keep_in_fp32_modules",
        "which is [], because DeepSpeed keeps only buffers: kept parameters get their fp32 data back after its cast, "
        "in groups of the optimizer of their own",
        When(
            "patterns with offload.params",
            lambda cfg: cfg.offload.params != "none" and cfg.precision.keep_fp32 not in ("auto", []),
            Fit.UNSUPPORTED,
            fields.KEPT_OFFLOADED.format(place="params"),
        ),
        When(
            "patterns with offload.optimizer, without full_shard",
            lambda cfg: (
                cfg.offload.optimizer != "none"
                and fields.stage(cfg) < 3
                and cfg.precision.keep_fp32 not in ("auto", [])
            ),
            Fit.UNSUPPORTED,
            fields.KEPT_OFFLOADED.format(place="optimizer"),
        ),
    ),
    "precision.buffers": done_by_unishard("cast before sharding; data_types.buffer_dtype is null"),
    "precision.loss_scale": row(
        Fit.EXACT,
        "unishard's loop; fp16.loss_scale is 1.0",
        "unishard scales the loss; DeepSpeed's optimizer divides and clips in one pass",
    ),
    "offload.params": exact(
        "zero_optimization.offload_param",
        When(
            "cpu or nvme with offload.optimizer none",
            lambda cfg: cfg.offload.params != "none" and cfg.offload.optimizer == "none",
            Fit.EQUIVALENT,
            "fp32 master weights stay on the device; set offload.optimizer: cpu to move them",
        ),
        When(
            "nvme",
            lambda cfg: cfg.offload.params == "nvme",
            Fit.EQUIVALENT,
            WEIGHTS_IN_FILES,
        ),
        to=fields.offload,
    ),
    "offload.optimizer": row(
        Fit.EXACT,
        "zero_optimization.offload_optimizer",
        "the torch optimizer steps on the host; DeepSpeedCPUAdam is not used",
        When(
            "nvme",
            lambda cfg: cfg.offload.optimizer == "nvme",
            Fit.EQUIVALENT,
            STATE_IN_FILES,
        ),
        to=fields.offload_optimizer,
    ),
    "offload.pin_memory": Rule(
        Fit.EXACT,
        "zero_optimization.offload_param.pin_memory, offload_optimizer.pin_memory",
        "prepare writes false without a CUDA device",
    ),
    "training.micro_batch_size": exact(
        "train_micro_batch_size_per_gpu",
        to=lambda cfg, topology: {"train_micro_batch_size_per_gpu": cfg.training.micro_batch_size},
    ),
    "training.gradient_accumulation_steps": row(
        Fit.EXACT,
        "gradient_accumulation_steps",
        "unishard divides the loss and ends the window (no managed_gradient_accumulation)",
        to=lambda cfg, topology: {"gradient_accumulation_steps": cfg.training.gradient_accumulation_steps},
    ),
    "training.global_batch_size": row(
        Fit.EXACT,
        "train_batch_size",
        "the product, of one group where there are groups; a stated value is only checked",
        to=fields.global_batch,
    ),
    "training.gradient_clipping": row(
        Fit.EXACT,
        "gradient_clipping",
        "0.0 for null: an absent key clips to 1.0; step(clip_grad_norm=...) for one update",
        When(
            "no_shard in fp32, or with master in the format of compute",
            lambda cfg: fields.bare(cfg) and cfg.training.gradient_clipping is not None,
            Fit.EQUIVALENT,
            "stage 0 discards the norm; unishard clips by torch's formula after the all-reduce",
        ),
        to=lambda cfg, topology: {"gradient_clipping": cfg.training.gradient_clipping or 0.0},
    ),
    "training.nonfinite": row(
        Fit.EXACT,
        "bf16.check_grad_overflow",
        "raise: skips the update first; ignore: ZeRO is kept from skipping it",
        When(
            "ignore with no_shard in bf16",
            lambda cfg: cfg.training.nonfinite == "ignore" and fields.stage(cfg) == 0 and not fields.bare(cfg),
            Fit.UNSUPPORTED,
            "stage 0 in bf16 skips such updates; write skip or raise, or choose shard_optimizer",
        ),
        to=lambda cfg, topology: {"bf16": {"check_grad_overflow": cfg.training.nonfinite != "ignore"}},
    ),
    "optimizer.name": Rule(
        Fit.EXACT,
        "client optimizer",
        "unishard passes in the torch optimizer, or its Muon or AdamW of 8 bits; ZeRO hands it flat fp32 partitions",
    ),
    "optimizer.no_decay": _GROUPS,
    "optimizer.groups": _GROUPS,
    "communication.reduce_bucket_size": row(
        Fit.EXACT,
        "zero_optimization.reduce_bucket_size",
        "prepare writes at most the number of trainable elements",
        When(
            "no_shard",
            lambda cfg: fields.stage(cfg) == 0,
            Fit.EQUIVALENT,
            "DeepSpeed uses buckets of 500,000,000 elements there",
        ),
        to=lambda cfg, topology: fields.zero(reduce_bucket_size=cfg.communication.reduce_bucket_size),
    ),
    "communication.prefetch_bucket_size": row(
        Fit.EXACT,
        "zero_optimization.stage3_prefetch_bucket_size",
        "prepare writes the elements of the largest unit for null, and lets no more live where parameters are dropped "
        "after forward",
        to=lambda cfg, topology: (
            fields.zero(stage3_prefetch_bucket_size=fields.ahead(cfg)) if fields.stage(cfg) == 3 else {}
        ),
    ),
    "communication.overlap": exact(
        "zero_optimization.overlap_comm",
        When(
            "true with no_shard, or shard_optimizer in fp32 or fp16",
            lambda cfg: cfg.communication.overlap and fields.stage(cfg) < 2,
            Fit.EQUIVALENT,
            "written as false: stages 0 and 1 reduce once, at the end of the window",
        ),
        to=lambda cfg, topology: fields.zero(overlap_comm=cfg.communication.overlap and fields.stage(cfg) >= 2),
    ),
    "compile.mode": row(
        Fit.EQUIVALENT,
        "torch.compile",
        "of each block's `forward`, without DeepSpeed's hooks; DeepCompile is not used",
        When(
            "full with full_shard",
            lambda cfg: cfg.compile.mode == "full" and fields.stage(cfg) == 3,
            Fit.EQUIVALENT,
            "of the root's `forward`, with a graph break at each gathering module",
        ),
        When("full", lambda cfg: cfg.compile.mode == "full", Fit.EQUIVALENT, "of the root's `forward`"),
    ),
    "native": Rule(Fit.EXACT, "any key", "`native.deepspeed` is merged last; each of its keys has a line of its own"),
}

RULES: Mapping[str, Rule] = complete(_OWN)
"""What DeepSpeed makes of each field."""
