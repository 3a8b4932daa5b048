"""How PyTorch implements each config field: one `Rule` per leaf, in the order of the schema. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.contract.field_rows import STATE_IN_FILES, WEIGHTS_IN_FILES, exact, row
from unishard.contract.loop_rules import complete
from unishard.contract.rules import Fit, Rule, When, done_by_unishard, unless
from unishard_fsdp import fields

_TOGETHER = "CPUOffloadPolicy moves parameters, gradients and optimizer state together"


_OWN: Mapping[str, Rule] = {
    "backend": Rule(Fit.EXACT, "torch", "PyTorch's own data parallelism"),
    "sharding.strategy": row(
        Fit.EXACT,
        "fully_shard, replicate or DistributedDataParallel; set_requires_gradient_sync, set_requires_all_reduce, "
        "set_reshard_after_backward",
        "fully_shard on units and root; gradients are reduce-scattered every micro-batch",
        unless(
            "no_shard in fp32",
            fields.is_form("DistributedDataParallel"),
            "DistributedDataParallel; all-reduce on the last micro-batch (no_sync on the others)",
        ),
        unless(
            "no_shard in bf16 or fp16, or with parallel.expert or parallel.tensor",
            lambda cfg: cfg.sharding.strategy == "no_shard",
            "fully_shard over groups of one rank: each has master weights and a compute copy",
        ),
        When(
            "shard_optimizer",
            fields.has_strategy("shard_optimizer"),
            Fit.EQUIVALENT,
            "parameters are sharded between steps and gathered once a step; reduce-scatter on the last micro-batch",
        ),
        When(
            "shard_grad_op",
            fields.has_strategy("shard_grad_op"),
            Fit.EQUIVALENT,
            "parameters are sharded between steps and gathered once a step; reduce-scatter every micro-batch; "
            "FSDP's SHARD_GRAD_OP is full_shard with reshard_after_forward: false",
        ),
        unless(
            "hybrid_shard",
            fields.has_strategy("hybrid_shard"),
            "full_shard in each group; gradient shards are all-reduced over the groups on the last micro-batch",
        ),
        When(
            "hybrid_shard_grad_op",
            fields.has_strategy("hybrid_shard_grad_op"),
            Fit.EQUIVALENT,
            "shard_grad_op in each group; gradient shards are all-reduced over the groups on the last micro-batch",
        ),
        to=fields.timing,
    ),
    "sharding.group_size": row(
        Fit.EXACT,
        "fully_shard(mesh=...)",
        "ranks in a row form a group; where one group holds all ranks, the mesh has one axis as without groups",
        to=fields.mesh,
    ),
    "sharding.reshard_after_forward": row(
        Fit.EXACT,
        "fully_shard(reshard_after_forward=...)",
        "of the units; the root and, with prefetching, the last unit are kept from forward to backward",
        to=lambda cfg, topology: fields.gathering(cfg, topology) if fields.form_of(cfg) == "fully_shard" else {},
    ),
    "sharding.units": row(
        Fit.EXACT,
        "fully_shard on each module",
        "one all-gather and one reduce-scatter a unit; the rest is the root's",
        unless(
            "DistributedDataParallel",
            fields.is_form("DistributedDataParallel"),
            "nothing is gathered; DDP reduces in buckets",
        ),
        to=fields.for_forms(("fully_shard",), lambda cfg: {"units": cfg.sharding.units}),
    ),
    "sharding.min_unit_params": exact(
        "which modules fully_shard is called on",
        to=fields.for_forms(("fully_shard",), lambda cfg: {"min_unit_params": cfg.sharding.min_unit_params}),
    ),
    "sharding.conditional_modules": row(
        Fit.EXACT,
        "which modules fully_shard is called on",
        "gathered and reduced with the unit around them, or with the root, which is kept from forward to backward",
        When(
            "DistributedDataParallel",
            fields.is_form("DistributedDataParallel"),
            Fit.EQUIVALENT,
            "find_unused_parameters is on, and gradients are all-reduced on every micro-batch, since DDP forgets "
            "which parameters the earlier ones used",
        ),
        unless(
            "replicate", fields.is_form("replicate"), "nothing is gathered; gradients are all-reduced block by block"
        ),
        to=lambda cfg, topology: {"conditional_modules": cfg.sharding.conditional_modules},
    ),
    "sharding.replicate": row(
        Fit.EXACT,
        "fully_shard(ignored_params=...)",
        "unishard casts them, keeps their master weights on every rank, and averages their gradients in one all-reduce "
        "when the last backward of a window ends",
        unless(
            "no_shard",
            lambda cfg: fields.form_of(cfg) != "fully_shard",
            "nothing to replicate: every rank holds every parameter whole",
        ),
        to=fields.for_forms(("fully_shard",), lambda cfg: {"ignored_params": cfg.sharding.replicate}),
    ),
    "precision.compute": row(
        Fit.EXACT,
        "MixedPrecisionPolicy(param_dtype=...)",
        "the optimizer steps the master weights; gathering makes copies in this dtype",
        to=fields.for_forms(fields.MIXED, fields.compute_dtypes),
    ),
    "precision.master": Rule(
        Fit.EXACT,
        "dtype of the parameters",
        "`prepare` casts trainable parameters before sharding; optimizer state has this dtype too",
    ),
    "precision.reduce": row(
        Fit.EXACT,
        "MixedPrecisionPolicy(reduce_dtype=...)",
        "the sum over the ranks is taken in this dtype",
        When(
            "another dtype than accumulate with no_shard or shard_optimizer",
            lambda cfg: fields.may_wait(cfg) and not fields.waits(cfg),
            Fit.EQUIVALENT,
            "reduced every micro-batch, because FSDP2 accumulates unreduced gradients in this dtype",
        ),
        to=fields.for_forms(fields.MIXED, fields.reduce_dtypes),
    ),
    "precision.accumulate": row(
        Fit.EXACT,
        "dtype of the parameters' gradients",
        "a gradient has the dtype of its parameter, the master weight",
        unless(
            "not that of master, with no_shard or shard_optimizer and reduce in the same",
            lambda cfg: cfg.precision.accumulate != cfg.precision.master and fields.waits(cfg),
            "FSDP2 accumulates in the reduce dtype until the last micro-batch (torch 2.13)",
        ),
        When(
            "not that of master",
            lambda cfg: cfg.precision.accumulate != cfg.precision.master,
            Fit.UNSUPPORTED,
            "FSDP2 keeps a gradient in the dtype of its parameter, the fp32 master weight; remove it, or reduce in "
            "this dtype too with no_shard or shard_optimizer, or choose backend deepspeed",
        ),
    ),
    "precision.cast_inputs": done_by_unishard(
        "hooks cast; MixedPrecisionPolicy(cast_forward_inputs=True) only for the root, and only if all of its inputs "
        "are cast"
    )._replace(to=fields.for_forms(fields.MIXED, fields.casts_inputs)),
    "precision.keep_fp32": done_by_unishard(
        "kept units have their own policy; other kept parameters are gathered in fp32 beside those of their unit"
    ),
    "precision.buffers": done_by_unishard("cast before sharding; FSDP2 casts none"),
    "precision.loss_scale": done_by_unishard("scales the loss and divides the gradients; a GradScaler is not used"),
    "offload.params": row(
        Fit.EXACT,
        "CPUOffloadPolicy",
        _TOGETHER,
        When(
            "without offload.optimizer",
            lambda cfg: cfg.offload.optimizer == "none",
            Fit.APPROXIMATE,
            f"{_TOGETHER}, so the optimizer's state lives in host memory as well, and it steps there: more device "
            "memory is free, and the update is slower; the same maths",
        ),
        When("nvme", lambda cfg: cfg.offload.params == "nvme", Fit.EQUIVALENT, WEIGHTS_IN_FILES),
    ),
    "offload.optimizer": row(
        Fit.EXACT,
        "CPUOffloadPolicy, or the optimizer on host copies",
        _TOGETHER,
        When("nvme", lambda cfg: cfg.offload.optimizer == "nvme", Fit.EQUIVALENT, STATE_IN_FILES),
        When(
            "cpu with shard_optimizer, shard_grad_op or hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.within_group != "full_shard",
            Fit.EQUIVALENT,
            "master weights, gradients and state are in host memory; gathered parameters on the device",
        ),
        When(
            "cpu without offload.params: cpu",
            fields.only_optimizer,
            Fit.EQUIVALENT,
            "unishard lets the torch optimizer step host copies of each rank's part and copies them back; state "
            "lies in host memory, the fp32 parts lie on the device as well",
        ),
    ),
    "offload.pin_memory": row(
        Fit.EXACT,
        "CPUOffloadPolicy(pin_memory=...), or of the host copies",
        "pinned where a CUDA device is present; without one there is nothing to copy to and torch refuses to pin",
        to=fields.for_forms(("fully_shard",), fields.offload),
    ),
    "optimizer.name": done_by_unishard(
        "torch's (fused AdamW and Adam; fused SGD without shards), lion-pytorch's, or Muon or AdamW of 8 bits on shards"
    ),
    "communication.reduce_bucket_size": row(
        Fit.EXACT,
        "DistributedDataParallel(bucket_cap_mb=...)",
        "4 bytes an element; DDP's first bucket has 1 MiB",
        When(
            "fully_shard or replicate",
            fields.is_form(*fields.MIXED),
            Fit.EQUIVALENT,
            "the gradients of a unit are reduced together, whatever its size",
        ),
        to=fields.for_forms(
            ("DistributedDataParallel",),
            lambda cfg: {"bucket_cap_mb": cfg.communication.reduce_bucket_size * 4 / 2**20},
        ),
    ),
    "communication.prefetch_bucket_size": row(
        Fit.EQUIVALENT,
        "set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
        "the next unit, or as many of the following ones as fit; where none fits, torch's own prefetch of the next "
        "unit remains",
        to=fields.for_forms(("fully_shard",), fields.prefetch),
    ),
    "communication.overlap": row(
        Fit.EXACT,
        "none: always overlapped",
        "reduction overlaps backward",
        When(
            "false",
            lambda cfg: not cfg.communication.overlap,
            Fit.EQUIVALENT,
            "overlapped all the same; the results do not differ",
        ),
    ),
    "compile.mode": row(
        Fit.EQUIVALENT,
        "torch.compile",
        "of each block's `forward`; the hooks that gather and reduce are not compiled",
        When(
            "full",
            lambda cfg: cfg.compile.mode == "full",
            Fit.EQUIVALENT,
            "of the root's `forward`, a graph break at each unit",
        ),
    ),
    "native": Rule(
        Fit.EXACT,
        "native.fsdp",
        "merged last and validated; each setting has its own line below, approximate if it may change the maths; other "
        "backends' settings are left to them",
    ),
}

RULES: Mapping[str, Rule] = complete(_OWN)
"""What PyTorch makes of each field. By default nothing is approximate, so that `strict: true` holds."""
