"""What PyTorch makes of each field of the config: one `Rule` a leaf, in the order of the schema. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from unishard.config import Config
from unishard.rules import Fit, Native, Rule, When, idle, loop
from unishard.topology import Topology

__all__ = ["RULES", "form_of"]

Form = Literal["fully_shard", "replicate", "DistributedDataParallel"]

_EVERY, _LAST = "every_micro_batch", "last_micro_batch"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def form_of(cfg: Config) -> Form:
    """Which of PyTorch's three forms of data parallelism runs a config."""
    if cfg.sharding.strategy == "no_shard":
        return "DistributedDataParallel" if cfg.precision.compute == "fp32" else "replicate"
    return "DistributedDataParallel" if _zero_redundancy(cfg) else "fully_shard"


def _zero_redundancy(cfg: Config) -> bool:
    asked = cfg.native.get("fsdp", {}).get("zero_redundancy_optimizer") is True
    return asked and cfg.sharding.strategy == "shard_optimizer" and cfg.precision.compute == "fp32"


def _strategy(*names: str) -> Callable[[Config], bool]:
    return lambda cfg: cfg.sharding.strategy in names


def _form(*forms: Form) -> Callable[[Config], bool]:
    return lambda cfg: form_of(cfg) in forms


def _for(forms: tuple[Form, ...], setting: Callable[[Config], Native]) -> Callable[[Config, Topology], Native]:
    """A setting that only these forms have."""
    return lambda cfg, topology: setting(cfg) if form_of(cfg) in forms else {}


def _may_wait(cfg: Config) -> bool:
    """Whether the strategy leaves gradients unreduced until the last micro-batch."""
    return cfg.sharding.strategy in ("no_shard", "shard_optimizer")


def _waits(cfg: Config) -> bool:
    """The same, if FSDP2 accumulates in the right format until then: it does so in the one that it reduces in (torch 2.13)."""
    return _may_wait(cfg) and cfg.precision.reduce == cfg.precision.accumulate


def _timing(cfg: Config, topology: Topology) -> Native:
    form = form_of(cfg)
    native: Native = {"data_parallel": form, "requires_gradient_sync": _LAST if _waits(cfg) else _EVERY}
    if form != "DistributedDataParallel":
        native["reshard_after_backward"] = _EVERY if cfg.sharding.strategy == "full_shard" else _LAST
    return native


def _compute(cfg: Config) -> Native:
    return {"mp_policy": {"param_dtype": None if cfg.precision.compute == "fp32" else _DTYPES[cfg.precision.compute]}}


def _reduce(cfg: Config) -> Native:
    return {"mp_policy": {"reduce_dtype": _DTYPES[cfg.precision.reduce]}}


def _offload(cfg: Config) -> Native:
    asked = "cpu" in (cfg.offload.params, cfg.offload.optimizer)
    return {"offload_policy": {"pin_memory": cfg.offload.pin_memory} if asked else None}


def _prefetch(cfg: Config) -> Native:
    return {"prefetch_numel": cfg.communication.prefetch_bucket_size if cfg.sharding.strategy == "full_shard" else None}


_MIXED: tuple[Form, ...] = ("fully_shard", "replicate")
_NOT_FP16 = idle("compute is not fp16", lambda cfg: cfg.precision.compute != "fp16", "nothing is scaled")
_TOGETHER = "CPUOffloadPolicy moves parameters, gradients and optimizer state together"


_LOOP: Mapping[str, Rule] = {
    "training.micro_batch_size": loop("batch size of `unishard.dataloader`"),
    "training.gradient_accumulation_steps": loop("`backward` divides the loss by it, `step` updates at the end of a window"),
    "training.global_batch_size": loop("compared with micro-batch x accumulation x ranks"),
    "training.gradient_clipping": loop("fp32 L2 norm over all ranks, formula of `torch.nn.utils.clip_grad_norm_`"),
    "training.nonfinite": loop("looks at the global norm before the update, which is the same on every rank"),
    "training.last_window": loop("`batches` looks one window ahead; `step` divides by the window's true length"),
    "training.seed": loop("seeds the data order, and each rank's generators after `prepare`"),
    "optimizer.name": loop(
        "torch's own, or Lion of lion-pytorch, built after sharding; a shard is updated as the whole would be. AdamW and Adam are fused, "
        "SGD where parameters are whole"
    ),
    "optimizer.lr": loop("argument of the optimizer"),
    "optimizer.betas": loop("argument of the optimizer"),
    "optimizer.eps": loop("argument of the optimizer"),
    "optimizer.amsgrad": loop("argument of the optimizer"),
    "optimizer.momentum": loop("argument of the optimizer"),
    "optimizer.nesterov": loop("argument of the optimizer"),
    "optimizer.weight_decay": loop("argument of the optimizer"),
    "optimizer.no_decay": loop("parameter groups, by the names that parameters have before sharding"),
    "optimizer.groups": loop("parameter groups, by the names that parameters have before sharding"),
    "scheduler.name": loop("closed form, written into the parameter groups after each update"),
    "scheduler.warmup_steps": loop("counts updates"),
    "scheduler.total_steps": loop("counts updates"),
    "scheduler.min_lr_ratio": loop("factor of `optimizer.lr`"),
}

RULES: Mapping[str, Rule] = {
    "backend": Rule(Fit.EXACT, "torch", "PyTorch's own data parallelism"),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "fully_shard, replicate or DistributedDataParallel; set_requires_gradient_sync, set_reshard_after_backward",
        "fully_shard on each unit and the root; gradients are reduce-scattered on every micro-batch",
        _timing,
        (
            When(
                "no_shard in fp32",
                lambda cfg: cfg.sharding.strategy == "no_shard" and cfg.precision.compute == "fp32",
                Fit.EXACT,
                "DistributedDataParallel; gradients are all-reduced on the last micro-batch (no_sync on the others)",
            ),
            When(
                "no_shard in bf16 or fp16",
                lambda cfg: cfg.sharding.strategy == "no_shard",
                Fit.EXACT,
                "replicate(): the masters and a copy in the compute format on each rank",
            ),
            When(
                "shard_optimizer with native.fsdp.zero_redundancy_optimizer",
                _zero_redundancy,
                Fit.EXACT,
                "DistributedDataParallel with ZeroRedundancyOptimizer; each rank steps whole parameters and broadcasts them",
            ),
            When(
                "shard_optimizer",
                _strategy("shard_optimizer"),
                Fit.EQUIVALENT,
                "fully_shard, gathered once a step; gradients are reduce-scattered on the last micro-batch; between steps the parameters "
                "are in parts as well",
            ),
            When(
                "shard_grad_op",
                _strategy("shard_grad_op"),
                Fit.EQUIVALENT,
                "fully_shard, gathered once a step; gradients are reduce-scattered on every micro-batch; between steps the parameters "
                "are in parts as well; FSDP's own SHARD_GRAD_OP is full_shard with reshard_after_forward: false",
            ),
        ),
    ),
    "sharding.reshard_after_forward": Rule(
        Fit.EXACT,
        "fully_shard(reshard_after_forward=...)",
        "of the units; the root is kept from forward to backward, torch's own default",
        _for(
            ("fully_shard",),
            lambda cfg: {"reshard_after_forward": cfg.sharding.strategy == "full_shard" and cfg.sharding.reshard_after_forward},
        ),
        (idle("strategy is not full_shard", lambda cfg: not _strategy("full_shard")(cfg), "only full_shard gathers twice"),),
    ),
    "sharding.units": Rule(
        Fit.EXACT,
        "fully_shard on each module",
        "one all-gather and one reduce-scatter a unit; the rest is the root's",
        _for(("fully_shard",), lambda cfg: {"units": cfg.sharding.units}),
        (
            idle("DistributedDataParallel", _form("DistributedDataParallel"), "nothing is gathered; DDP reduces in buckets"),
            idle("replicate", _form("replicate"), "nothing is gathered; gradients are all-reduced block by block"),
        ),
    ),
    "sharding.min_unit_params": Rule(
        Fit.EXACT,
        "which modules fully_shard is called on",
        "",
        _for(("fully_shard",), lambda cfg: {"min_unit_params": cfg.sharding.min_unit_params}),
    ),
    "precision.compute": Rule(
        Fit.EXACT,
        "MixedPrecisionPolicy(param_dtype=...)",
        "the parameters that the optimizer steps are the masters; copies in this format are made when they are gathered",
        _for(_MIXED, _compute),
    ),
    "precision.master": Rule(
        Fit.EXACT,
        "format of the parameters",
        "`prepare` casts the trainable parameters to it before sharding; the optimizer's state follows it",
    ),
    "precision.reduce": Rule(
        Fit.EXACT,
        "MixedPrecisionPolicy(reduce_dtype=...)",
        "the sum over the ranks is taken in this format",
        _for(_MIXED, _reduce),
        (
            When(
                "another format than accumulate with no_shard or shard_optimizer",
                lambda cfg: _may_wait(cfg) and not _waits(cfg),
                Fit.EQUIVALENT,
                "gradients are reduced on every micro-batch, since FSDP2 accumulates in the reduce format what it has not reduced yet",
            ),
        ),
    ),
    "precision.accumulate": Rule(
        Fit.EXACT,
        "format of the parameters' gradients",
        "a gradient has the format of its parameter, which is the master",
        when=(
            When(
                "not that of master, with no_shard or shard_optimizer and reduce in the same",
                lambda cfg: cfg.precision.accumulate != cfg.precision.master and _waits(cfg),
                Fit.EXACT,
                "FSDP2 adds up in the reduce format until the last micro-batch (torch 2.13)",
            ),
            When(
                "not that of master",
                lambda cfg: cfg.precision.accumulate != cfg.precision.master,
                Fit.UNSUPPORTED,
                "FSDP2 keeps a gradient in the format of its parameter, the fp32 master; remove it, or reduce in this format as well and "
                "choose no_shard or shard_optimizer, or backend deepspeed",
            ),
        ),
    ),
    "precision.buffers": loop("cast before sharding; FSDP2 casts none"),
    "precision.loss_scale": loop("scales the loss and divides the gradients; a GradScaler is not used", _NOT_FP16),
    "precision.initial_loss_scale": loop("where the dynamic scale begins", _NOT_FP16),
    "precision.loss_scale_growth_interval": loop("counts updates", _NOT_FP16),
    "offload.params": Rule(
        Fit.EXACT,
        "CPUOffloadPolicy",
        _TOGETHER,
        when=(
            idle("none", lambda cfg: cfg.offload.params == "none", ""),
            When(
                "cpu without offload.optimizer: cpu",
                lambda cfg: cfg.offload.optimizer != "cpu",
                Fit.UNSUPPORTED,
                f"{_TOGETHER}; set offload: cpu",
            ),
        ),
    ),
    "offload.optimizer": Rule(
        Fit.EXACT,
        "CPUOffloadPolicy",
        _TOGETHER,
        when=(
            idle("none", lambda cfg: cfg.offload.optimizer == "none", ""),
            When(
                "cpu with native.fsdp.zero_redundancy_optimizer",
                _zero_redundancy,
                Fit.UNSUPPORTED,
                "DistributedDataParallel has no offload; remove native.fsdp.zero_redundancy_optimizer",
            ),
            When(
                "cpu with shard_optimizer or shard_grad_op",
                _strategy("shard_optimizer", "shard_grad_op"),
                Fit.EQUIVALENT,
                "masters, gradients and optimizer state lie in host memory; gathered parameters stay on the device until the step",
            ),
            When(
                "cpu without offload.params: cpu",
                lambda cfg: cfg.offload.params != "cpu",
                Fit.UNSUPPORTED,
                f"{_TOGETHER}; set offload: cpu, or choose shard_grad_op, or backend deepspeed",
            ),
        ),
    ),
    "offload.pin_memory": Rule(
        Fit.EXACT,
        "CPUOffloadPolicy(pin_memory=...)",
        "pinned where a CUDA device is present; without one there is nothing to copy to and torch refuses to pin",
        to=_for(("fully_shard",), _offload),
        when=(idle("nothing is offloaded", lambda cfg: cfg.offload.params == cfg.offload.optimizer == "none", ""),),
    ),
    **_LOOP,
    "communication.reduce_bucket_size": Rule(
        Fit.EXACT,
        "DistributedDataParallel(bucket_cap_mb=...)",
        "4 bytes an element; DDP's first bucket has 1 MiB",
        _for(("DistributedDataParallel",), lambda cfg: {"bucket_cap_mb": cfg.communication.reduce_bucket_size * 4 / 2**20}),
        (
            When(
                "fully_shard or replicate",
                _form(*_MIXED),
                Fit.EQUIVALENT,
                "the gradients of a unit are reduced together, whatever its size",
            ),
        ),
    ),
    "communication.prefetch_bucket_size": Rule(
        Fit.EQUIVALENT,
        "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
        "as many of the following units as fit are gathered ahead; where none fits, torch's own prefetch of the next unit remains",
        _for(("fully_shard",), _prefetch),
        (idle("strategy is not full_shard", lambda cfg: not _strategy("full_shard")(cfg), "only full_shard gathers unit by unit"),),
    ),
    "communication.overlap": Rule(
        Fit.EXACT,
        "none: always overlapped",
        "reduction goes on beside backward",
        when=(
            When("false", lambda cfg: not cfg.communication.overlap, Fit.EQUIVALENT, "overlapped all the same; the results do not differ"),
        ),
    ),
    "communication.desync_check": loop("a few bytes over gloo before each collective call; none with one rank"),
    "communication.desync_timeout": loop("seconds of patience of that check"),
    "strict": loop("an approximation is refused"),
    "native": Rule(
        Fit.EXACT,
        "native.fsdp",
        "merged last and validated; each setting has its own line below, approximate if it may change the maths; other backends' "
        "settings are left to them",
    ),
}
"""What PyTorch makes of each field. By default nothing is approximate, so that `strict: true` holds."""
