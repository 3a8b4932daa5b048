"""How PyTorch implements each config field: one `Rule` per leaf, in the order of the schema. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.loop_rules import NOT_FP16, complete
from unishard.contract.rules import Fit, Rule, When, done_by_unishard, unless
from unishard_fsdp.precision_keys import DTYPES

__all__ = ["RULES", "form_of"]

Form = Literal["fully_shard", "replicate", "DistributedDataParallel"]

_EVERY, _LAST = "every_micro_batch", "last_micro_batch"


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


def _within(name: str) -> Callable[[Config], bool]:
    """Whether this is the strategy within a group of ranks that share one copy."""
    return lambda cfg: cfg.sharding.within_group == name


def _form(*forms: Form) -> Callable[[Config], bool]:
    return lambda cfg: form_of(cfg) in forms


def _for(forms: tuple[Form, ...], setting: Callable[[Config], Native]) -> Callable[[Config, Topology], Native]:
    """A setting that only these forms have."""
    return lambda cfg, topology: setting(cfg) if form_of(cfg) in forms else {}


def _may_wait(cfg: Config) -> bool:
    """Whether the strategy leaves gradients unreduced until the last micro-batch."""
    return cfg.sharding.strategy in ("no_shard", "shard_optimizer")


def _waits(cfg: Config) -> bool:
    """The same, if FSDP2 then accumulates in the right dtype: it accumulates in the reduce dtype (torch 2.13)."""
    return _may_wait(cfg) and cfg.precision.reduce == cfg.precision.accumulate


def _timing(cfg: Config, topology: Topology) -> Native:
    form = form_of(cfg)
    waits = _waits(cfg) and not (form == "DistributedDataParallel" and cfg.sharding.conditional_modules)
    native: Native = {"data_parallel": form, "requires_gradient_sync": _LAST if waits else _EVERY}
    if form != "DistributedDataParallel":
        native["reshard_after_backward"] = _EVERY if cfg.sharding.within_group == "full_shard" else _LAST
    if form == "fully_shard":
        # FSDP2 accumulates in the reduce dtype until gradients are reduced between groups.
        late = _LAST if cfg.precision.reduce == cfg.precision.accumulate else _EVERY
        native["requires_all_reduce"] = late if _groups(cfg, topology) > 1 else None
    return native


def _groups(cfg: Config, topology: Topology) -> int:
    """Number of groups that each hold a copy, for hybrid strategies."""
    return topology.world_size // shard_group_size(cfg, topology) if cfg.sharding.hybrid else 1


def _mesh(cfg: Config, topology: Topology) -> Native:
    if form_of(cfg) != "fully_shard":
        return {}
    groups = _groups(cfg, topology)
    return {"mesh": {"replicate": groups, "shard": shard_group_size(cfg, topology)} if groups > 1 else None}


def _resharding(cfg: Config, topology: Topology) -> bool | int:
    """What `fully_shard` gets; a number that is not smaller than the group means all of it, and torch refuses a larger
    one.
    """
    if cfg.sharding.within_group != "full_shard":
        return False
    kept = cfg.sharding.reshard_group
    return cfg.sharding.reshard_after_forward if kept is None or kept < shard_group_size(cfg, topology) else True


def _gathering(cfg: Config, topology: Topology) -> Native:
    """When units are resharded after forward. Backward gathers the last one next, so that prefetching means to keep it.

    With a smaller group, embeddings are gathered too: nothing else frees what they keep there (torch 2.13,
    `_fsdp_param.py`, `to_sharded`).
    """
    resharding = _resharding(cfg, topology)
    return {
        "reshard_after_forward": resharding,
        "keep_last_unit": bool(resharding) and cfg.communication.prefetch_bucket_size != 0,
        "unshard_embeddings_in_backward": resharding is not True,
    }


def _compute(cfg: Config) -> Native:
    return {"mp_policy": {"param_dtype": None if cfg.precision.compute == "fp32" else DTYPES[cfg.precision.compute]}}


def _reduce(cfg: Config) -> Native:
    return {"mp_policy": {"reduce_dtype": DTYPES[cfg.precision.reduce]}}


def _only_optimizer(cfg: Config) -> bool:
    """Whether only the optimizer is offloaded; not by FSDP2, which would gather parameters from the host."""
    return cfg.offload.optimizer == "cpu" and cfg.offload.params == "none" and cfg.sharding.within_group == "full_shard"


def _offload(cfg: Config) -> Native:
    place = {"pin_memory": cfg.offload.pin_memory} if "cpu" in (cfg.offload.params, cfg.offload.optimizer) else None
    only_optimizer = _only_optimizer(cfg)
    return {"offload_policy": None if only_optimizer else place, "host_optimizer": place if only_optimizer else None}


def _prefetch(cfg: Config) -> Native:
    if cfg.sharding.within_group != "full_shard":
        return {"prefetch_numel": None}
    size = cfg.communication.prefetch_bucket_size
    return {"prefetch_numel": "next_unit" if size is None else size}


_MIXED: tuple[Form, ...] = ("fully_shard", "replicate")
_TOGETHER = "CPUOffloadPolicy moves parameters, gradients and optimizer state together"
_NO_NVME = "PyTorch has no offload to files; choose cpu, or backend deepspeed"


_OWN: Mapping[str, Rule] = {
    "backend": Rule(Fit.EXACT, "torch", "PyTorch's own data parallelism"),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "fully_shard, replicate or DistributedDataParallel; set_requires_gradient_sync, set_requires_all_reduce, "
        "set_reshard_after_backward",
        "fully_shard on units and root; gradients are reduce-scattered every micro-batch",
        _timing,
        (
            When(
                "no_shard in fp32",
                lambda cfg: cfg.sharding.strategy == "no_shard" and cfg.precision.compute == "fp32",
                Fit.EXACT,
                "DistributedDataParallel; all-reduce on the last micro-batch (no_sync on the others)",
            ),
            When(
                "no_shard in bf16 or fp16",
                lambda cfg: cfg.sharding.strategy == "no_shard",
                Fit.EXACT,
                "fully_shard over groups of one rank: each has master weights and a compute copy",
            ),
            When(
                "shard_optimizer with native.fsdp.zero_redundancy_optimizer",
                _zero_redundancy,
                Fit.EXACT,
                "ZeroRedundancyOptimizer: each rank steps some full parameters and broadcasts them",
            ),
            When(
                "shard_optimizer",
                _strategy("shard_optimizer"),
                Fit.EQUIVALENT,
                "parameters are sharded between steps and gathered once a step; reduce-scatter on the last micro-batch",
            ),
            When(
                "shard_grad_op",
                _strategy("shard_grad_op"),
                Fit.EQUIVALENT,
                "parameters are sharded between steps and gathered once a step; reduce-scatter every micro-batch; "
                "FSDP's SHARD_GRAD_OP is full_shard with reshard_after_forward: false",
            ),
            When(
                "hybrid_shard",
                _strategy("hybrid_shard"),
                Fit.EXACT,
                "full_shard in each group; gradient shards are all-reduced over the groups on the last micro-batch",
            ),
            When(
                "hybrid_shard_grad_op",
                _strategy("hybrid_shard_grad_op"),
                Fit.EQUIVALENT,
                "shard_grad_op in each group; gradient shards are all-reduced over the groups on the last micro-batch",
            ),
        ),
    ),
    "sharding.group_size": Rule(
        Fit.EXACT,
        "fully_shard(mesh=...)",
        "ranks in a row form a group; where one group holds all ranks, the mesh has one axis as without groups",
        _mesh,
        (unless("strategy is not hybrid", lambda cfg: not cfg.sharding.hybrid, "all ranks share one copy"),),
    ),
    "sharding.reshard_after_forward": Rule(
        Fit.EXACT,
        "fully_shard(reshard_after_forward=...)",
        "of the units; the root and, with prefetching, the last unit are kept from forward to backward",
        lambda cfg, topology: _gathering(cfg, topology) if form_of(cfg) == "fully_shard" else {},
        (
            unless(
                "strategy is not full_shard",
                lambda cfg: not _within("full_shard")(cfg),
                "only full_shard gathers twice",
            ),
        ),
    ),
    "sharding.units": Rule(
        Fit.EXACT,
        "fully_shard on each module",
        "one all-gather and one reduce-scatter a unit; the rest is the root's",
        _for(("fully_shard",), lambda cfg: {"units": cfg.sharding.units}),
        (
            unless(
                "DistributedDataParallel",
                _form("DistributedDataParallel"),
                "nothing is gathered; DDP reduces in buckets",
            ),
            unless("replicate", _form("replicate"), "nothing is gathered; gradients are all-reduced block by block"),
        ),
    ),
    "sharding.min_unit_params": Rule(
        Fit.EXACT,
        "which modules fully_shard is called on",
        "",
        _for(("fully_shard",), lambda cfg: {"min_unit_params": cfg.sharding.min_unit_params}),
    ),
    "sharding.conditional_modules": Rule(
        Fit.EXACT,
        "which modules fully_shard is called on",
        "gathered and reduced with the unit around them, or with the root, which is kept from forward to backward",
        lambda cfg, topology: {"conditional_modules": cfg.sharding.conditional_modules},
        (
            unless("empty", lambda cfg: not cfg.sharding.conditional_modules, ""),
            When(
                "DistributedDataParallel",
                _form("DistributedDataParallel"),
                Fit.EQUIVALENT,
                "find_unused_parameters is on, and gradients are all-reduced on every micro-batch, since DDP forgets "
                "which parameters the earlier ones used",
            ),
            When(
                "replicate",
                _form("replicate"),
                Fit.EXACT,
                "nothing is gathered; gradients are all-reduced block by block",
            ),
        ),
    ),
    "precision.compute": Rule(
        Fit.EXACT,
        "MixedPrecisionPolicy(param_dtype=...)",
        "the optimizer steps the master weights; gathering makes copies in this dtype",
        _for(_MIXED, _compute),
    ),
    "precision.master": Rule(
        Fit.EXACT,
        "dtype of the parameters",
        "`prepare` casts trainable parameters before sharding; optimizer state has this dtype too",
    ),
    "precision.reduce": Rule(
        Fit.EXACT,
        "MixedPrecisionPolicy(reduce_dtype=...)",
        "the sum over the ranks is taken in this dtype",
        _for(_MIXED, _reduce),
        (
            When(
                "another dtype than accumulate with no_shard or shard_optimizer",
                lambda cfg: _may_wait(cfg) and not _waits(cfg),
                Fit.EQUIVALENT,
                "reduced every micro-batch, because FSDP2 accumulates unreduced gradients in this dtype",
            ),
        ),
    ),
    "precision.accumulate": Rule(
        Fit.EXACT,
        "dtype of the parameters' gradients",
        "a gradient has the dtype of its parameter, the master weight",
        when=(
            When(
                "not that of master, with no_shard or shard_optimizer and reduce in the same",
                lambda cfg: cfg.precision.accumulate != cfg.precision.master and _waits(cfg),
                Fit.EXACT,
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
    ),
    "precision.cast_inputs": done_by_unishard(
        "hooks cast; MixedPrecisionPolicy(cast_forward_inputs=True) only for the root, and only if all of its inputs "
        "are cast"
    )._replace(to=_for(_MIXED, lambda cfg: {"mp_policy": {"cast_forward_inputs": cfg.precision.cast_inputs is True}})),
    "precision.keep_fp32": done_by_unishard(
        "kept units have their own policy; other kept parameters are gathered in fp32 beside those of their unit"
    ),
    "precision.buffers": done_by_unishard("cast before sharding; FSDP2 casts none"),
    "precision.loss_scale": done_by_unishard(
        "scales the loss and divides the gradients; a GradScaler is not used", NOT_FP16
    ),
    "offload.params": Rule(
        Fit.EXACT,
        "CPUOffloadPolicy",
        _TOGETHER,
        when=(
            unless("none", lambda cfg: cfg.offload.params == "none", ""),
            When("nvme", lambda cfg: cfg.offload.params == "nvme", Fit.UNSUPPORTED, _NO_NVME),
            When(
                "cpu without offload.optimizer: cpu",
                lambda cfg: cfg.offload.optimizer == "none",
                Fit.APPROXIMATE,
                f"{_TOGETHER}, so the optimizer's state lives in host memory as well, and it steps there: more device "
                "memory is free, and the update is slower; the same maths",
            ),
        ),
    ),
    "offload.optimizer": Rule(
        Fit.EXACT,
        "CPUOffloadPolicy, or the optimizer on host copies",
        _TOGETHER,
        when=(
            unless("none", lambda cfg: cfg.offload.optimizer == "none", ""),
            When("nvme", lambda cfg: cfg.offload.optimizer == "nvme", Fit.UNSUPPORTED, _NO_NVME),
            When(
                "cpu with native.fsdp.zero_redundancy_optimizer",
                _zero_redundancy,
                Fit.UNSUPPORTED,
                "DistributedDataParallel has no offload; remove native.fsdp.zero_redundancy_optimizer",
            ),
            When(
                "cpu with shard_optimizer, shard_grad_op or hybrid_shard_grad_op",
                lambda cfg: cfg.sharding.within_group != "full_shard",
                Fit.EQUIVALENT,
                "master weights, gradients and state are in host memory; gathered parameters on the device",
            ),
            When(
                "cpu without offload.params: cpu",
                _only_optimizer,
                Fit.EQUIVALENT,
                "unishard lets the torch optimizer step host copies of each rank's part and copies them back; state "
                "lies in host memory, the fp32 parts lie on the device as well",
            ),
        ),
    ),
    "offload.pin_memory": Rule(
        Fit.EXACT,
        "CPUOffloadPolicy(pin_memory=...), or of the host copies",
        "pinned where a CUDA device is present; without one there is nothing to copy to and torch refuses to pin",
        to=_for(("fully_shard",), _offload),
        when=(unless("nothing is offloaded", lambda cfg: cfg.offload.params == cfg.offload.optimizer == "none", ""),),
    ),
    "offload.nvme_path": Rule(
        Fit.EXACT,
        "none",
        when=(
            unless("null", lambda cfg: cfg.offload.nvme_path is None, ""),
            When("set", lambda cfg: True, Fit.UNSUPPORTED, _NO_NVME),
        ),
    ),
    "optimizer.name": done_by_unishard("torch's (fused AdamW and Adam; fused SGD without shards), or lion-pytorch's"),
    "communication.reduce_bucket_size": Rule(
        Fit.EXACT,
        "DistributedDataParallel(bucket_cap_mb=...)",
        "4 bytes an element; DDP's first bucket has 1 MiB",
        _for(
            ("DistributedDataParallel",),
            lambda cfg: {"bucket_cap_mb": cfg.communication.reduce_bucket_size * 4 / 2**20},
        ),
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
        "the next unit, or as many of the following ones as fit; where none fits, torch's own prefetch of the next "
        "unit remains",
        _for(("fully_shard",), _prefetch),
        (
            unless(
                "strategy is not full_shard",
                lambda cfg: not _within("full_shard")(cfg),
                "only full_shard gathers unit by unit",
            ),
        ),
    ),
    "communication.overlap": Rule(
        Fit.EXACT,
        "none: always overlapped",
        "reduction overlaps backward",
        when=(
            When(
                "false",
                lambda cfg: not cfg.communication.overlap,
                Fit.EQUIVALENT,
                "overlapped all the same; the results do not differ",
            ),
        ),
    ),
    "compile.mode": Rule(
        Fit.EQUIVALENT,
        "torch.compile",
        "of each block's `forward`; the hooks that gather and reduce are not compiled",
        when=(
            unless("none", lambda cfg: cfg.compile.mode == "none", ""),
            When(
                "full",
                lambda cfg: cfg.compile.mode == "full",
                Fit.EQUIVALENT,
                "of the root's `forward`, a graph break at each unit",
            ),
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
