"""The table: what DeepSpeed 0.19.8 makes of each field of the config."""

from __future__ import annotations

from unishard.mapping.rules import SAVING, Fit, Rule, When, loop, unless
from unishard_deepspeed import fields
from unishard_deepspeed.loop_rules import LOOP

__all__ = ["RULES"]

_NOT_FP16 = unless("compute is not fp16", lambda cfg: cfg.precision.compute != "fp16", "nothing is scaled")
_NOT_STAGE_3 = "has no meaning below stage 3, where each rank holds whole parameters"


_BETWEEN = (
    "unishard averages each rank's part of the gradients over the groups at the end of a window, after the last backward instead of "
    "beside it (MiCS, which did that, has left DeepSpeed 0.19.8; hpZ still divides optimizer and gradients between all ranks)"
)


RULES: dict[str, Rule] = {
    "backend": loop("chooses this table"),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "zero_optimization.stage",
        "stage 3",
        to=lambda cfg, topology: fields.zero(stage=fields.stage(cfg)),
        when=(
            When("no_shard", lambda cfg: fields.stage(cfg) == 0, Fit.EXACT, "stage 0: one all-reduce for each update"),
            When(
                "shard_optimizer in bf16 or fp16, accumulated in fp32",
                fields.whole_gradients,
                Fit.EQUIVALENT,
                "stage 1; DeepSpeed keeps whole fp32 gradients beside the low ones (4 more bytes for each parameter) and all-reduces them",
            ),
            When(
                "shard_optimizer",
                lambda cfg: fields.stage(cfg) == 1,
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
                lambda cfg: fields.stage(cfg) == 2,
                Fit.EQUIVALENT,
                "stage 2; gradients travel by all-reduce instead of reduce-scatter",
            ),
        ),
    ),
    "sharding.group_size": Rule(
        Fit.EXACT,
        "deepspeed.initialize(mpu=...)",
        "not in the JSON: prepare gives ZeRO the ranks of a group as its data-parallel group; ranks in a row form a group",
        when=(unless("strategy is not hybrid", lambda cfg: not cfg.sharding.hybrid, "all ranks share one copy"),),
    ),
    "sharding.reshard_after_forward": Rule(
        Fit.EXACT,
        "zero_optimization.stage3_max_reuse_distance, stage3_max_live_parameters",
        "each unit is gathered for its forward and again for its backward; false: everything stays gathered until its backward",
        to=fields.gathering,
        when=(
            unless("strategy is not full_shard", lambda cfg: fields.stage(cfg) != 3, _NOT_STAGE_3),
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
        to=fields.units,
        when=(unless("strategy is not full_shard", lambda cfg: fields.stage(cfg) != 3, _NOT_STAGE_3),),
    ),
    "sharding.min_unit_params": Rule(
        Fit.EXACT,
        "zero_optimization.leaf_module.names",
        "smaller modules are not among the names",
        when=(unless("strategy is not full_shard", lambda cfg: fields.stage(cfg) != 3, _NOT_STAGE_3),),
    ),
    "sharding.conditional_modules": Rule(
        Fit.EXACT,
        "none: unishard's own",
        "where a rank did not use a parameter, it adds zeros to the average",
        when=(
            unless("empty", lambda cfg: not cfg.sharding.conditional_modules, ""),
            When(
                "full_shard",
                lambda cfg: fields.stage(cfg) == 3,
                Fit.EQUIVALENT,
                "gathered with the leaf module around them; those in none are gathered before each forward and dropped after each "
                "backward, without DeepSpeed's hooks; their gradients stay whole until backward ends",
            ),
            When(
                "shard_grad_op",
                lambda cfg: fields.stage(cfg) == 2,
                Fit.EQUIVALENT,
                "their gradients stay whole until backward ends, and are then reduced in one order on every rank",
            ),
        ),
    ),
    "precision.compute": Rule(
        Fit.EXACT,
        "bf16.enabled, fp16.enabled, data_types.param_dtype",
        "prepare sets the fp32 masters from the fp32 model (DeepSpeed alone would round them) and casts floating inputs",
        to=fields.compute,
    ),
    "precision.master": Rule(
        Fit.EXACT,
        "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states",
        "`prepare` casts the trainable parameters to it before sharding; the optimizer's state follows it",
        to=fields.master,
        when=(
            When(
                "that of compute with no_shard",
                lambda cfg: cfg.precision.pure and fields.stage(cfg) == 0,
                Fit.EXACT,
                "DeepSpeed is told of fp32 and finds a model in the lower format, whose own parameters the torch optimizer then steps",
            ),
            When(
                "fp16 with sharding",
                lambda cfg: cfg.precision.master == "fp16",
                Fit.UNSUPPORTED,
                "DeepSpeed has fp16 masters only under its own CPU optimizer; write fp32, or choose no_shard or compute and master bf16",
            ),
            When(
                "bf16 with offload.optimizer cpu",
                lambda cfg: cfg.precision.master == "bf16" and cfg.offload.optimizer == "cpu",
                Fit.UNSUPPORTED,
                "DeepSpeed offloads bf16 masters only under its own CPU optimizer; write fp32, or set offload.optimizer to none",
            ),
        ),
    ),
    "precision.reduce": Rule(
        Fit.EXACT,
        "communication_data_type",
        "the sum over the ranks is taken in this format",
        to=lambda cfg, topology: {"communication_data_type": cfg.precision.reduce},
    ),
    "precision.accumulate": Rule(
        Fit.EXACT,
        "data_types.grad_accum_dtype",
        to=fields.accumulate,
        when=(
            When(
                "fp32 in bf16 or fp16 with no_shard",
                lambda cfg: fields.stage(cfg) == 0 and fields.wide(cfg),
                Fit.EXACT,
                "stage 0 takes no other format than that of compute; prepare lets torch accumulate in fp32 (Tensor.grad_dtype)",
            ),
        ),
    ),
    "precision.buffers": loop("cast before sharding (data_types.buffer_dtype is null, so that DeepSpeed casts none)"),
    "precision.loss_scale": Rule(
        Fit.EXACT,
        "unishard's loop; fp16.loss_scale is 1.0",
        "unishard scales the loss; step makes the scale known to DeepSpeed's optimizer, which divides and clips in one pass",
        when=(_NOT_FP16,),
    ),
    "precision.initial_loss_scale": loop("where the dynamic scale begins", _NOT_FP16),
    "precision.loss_scale_growth_interval": loop("counts updates", _NOT_FP16),
    "offload.params": Rule(
        Fit.EXACT,
        "zero_optimization.offload_param",
        to=fields.offload,
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
        to=fields.offload_optimizer,
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
        when=(unless("null", lambda cfg: cfg.offload.nvme_path is None, ""),),
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
        to=fields.global_batch,
    ),
    "training.gradient_clipping": Rule(
        Fit.EXACT,
        "gradient_clipping",
        "0.0 for null, since DeepSpeed clips to 1.0 when the key is absent; step(clip_grad_norm=...) sets it for one update",
        to=lambda cfg, topology: {"gradient_clipping": cfg.training.gradient_clipping or 0.0},
        when=(
            When(
                "no_shard in fp32, or with master in the format of compute",
                lambda cfg: fields.bare(cfg) and cfg.training.gradient_clipping is not None,
                Fit.EQUIVALENT,
                "stage 0 discards the norm then, so unishard takes it and clips, by torch's formula, after the all-reduce",
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
                lambda cfg: cfg.training.nonfinite == "ignore" and fields.stage(cfg) == 0 and not fields.bare(cfg),
                Fit.UNSUPPORTED,
                "stage 0 in bf16 always leaves out an update that is not finite; write skip or raise, or choose shard_optimizer",
            ),
        ),
    ),
    "training.last_window": loop("divides by the true length of the last window, or leaves it out"),
    "training.seed": loop("seeds the data order, and each rank after prepare"),
    **LOOP,
    "communication.reduce_bucket_size": Rule(
        Fit.EXACT,
        "zero_optimization.reduce_bucket_size",
        "prepare writes no more than the trainable elements, so that the buffer is not larger than the model",
        to=lambda cfg, topology: fields.zero(reduce_bucket_size=cfg.communication.reduce_bucket_size),
        when=(
            When(
                "no_shard, or shard_optimizer in bf16 accumulated in fp32",
                lambda cfg: fields.stage(cfg) == 0 or fields.bf16_optimizer(cfg),
                Fit.EQUIVALENT,
                "DeepSpeed uses buckets of 500,000,000 elements there",
            ),
        ),
    ),
    "communication.prefetch_bucket_size": Rule(
        Fit.EXACT,
        "zero_optimization.stage3_prefetch_bucket_size",
        "not more than the largest unit where parameters are dropped after forward",
        to=lambda cfg, topology: (
            fields.zero(stage3_prefetch_bucket_size=cfg.communication.prefetch_bucket_size) if fields.stage(cfg) == 3 else {}
        ),
        when=(unless("strategy is not full_shard", lambda cfg: fields.stage(cfg) != 3, _NOT_STAGE_3),),
    ),
    "communication.overlap": Rule(
        Fit.EXACT,
        "zero_optimization.overlap_comm",
        to=lambda cfg, topology: fields.zero(overlap_comm=cfg.communication.overlap and fields.stage(cfg) >= 2),
        when=(
            When(
                "true with no_shard or shard_optimizer",
                lambda cfg: cfg.communication.overlap and fields.stage(cfg) < 2,
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
            unless("none", lambda cfg: cfg.compile.mode == "none", ""),
            When(
                "full with full_shard",
                lambda cfg: cfg.compile.mode == "full" and fields.stage(cfg) == 3,
                Fit.EQUIVALENT,
                "of the root's `forward`, with a graph break at each module that gathers; choose per_block for larger graphs",
            ),
            When("full", lambda cfg: cfg.compile.mode == "full", Fit.EQUIVALENT, "of the root's `forward`"),
        ),
    ),
    "compile.backend": Rule(Fit.EXACT, "torch.compile(backend=...)"),
    **SAVING,
    "strict": loop("decides about the report of this table"),
    "native": Rule(
        Fit.EXACT,
        "any key",
        "`native.deepspeed` is merged last; each of its keys has a line of its own in the report, approximate if it may change the maths",
    ),
}
