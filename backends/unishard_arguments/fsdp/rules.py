"""How a training script without unishard sets each field with FSDP2 (torch 2.13): one row per leaf of the schema, in
its order.

Imports no torch. What FSDP does not do, the script must; the notes say what to write there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.fallbacks import noted, rows
from unishard.contract.field_rows import (
    NO_FILES,
    asked,
    exact,
    moved_together,
    no_key,
    nonfinite_unchecked,
    row,
    saved_by_script,
)
from unishard.contract.rules import (
    SCRIPT,
    Fit,
    Rule,
    approximate,
    equivalent,
    is_,
    mixed,
    needs_input,
    sharded,
    unless,
)
from unishard_fsdp.fields import DTYPES


def _reshard(cfg: Config, topology: Topology) -> Native:
    if not sharded(cfg):
        return {}
    return {"reshard_after_forward": cfg.sharding.within_group == "full_shard" and cfg.sharding.reshard_after_forward}


def _mesh(cfg: Config, topology: Topology) -> Native:
    """The mesh axes, without the number of groups if the number of ranks is unknown."""
    if not cfg.sharding.hybrid:
        return {} if sharded(cfg) else {"mesh": {"replicate": topology.world_size, "shard": 1}}
    group = shard_group_size(cfg, topology)
    if group == 1:
        return {}
    groups, rest = divmod(topology.world_size, group)
    return {"mesh": {"shard": group} if rest or not groups else {"replicate": groups, "shard": group}}


def _units(cfg: Config, topology: Topology) -> Native:
    if not sharded(cfg):
        return {}
    if cfg.sharding.units != "auto":
        return {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": list(cfg.sharding.units)}
    return {} if cfg.sharding.min_unit_params else {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}


def _by_size(cfg: Config) -> bool:
    return sharded(cfg) and cfg.sharding.units == "auto" and cfg.sharding.min_unit_params > 0


def _least(cfg: Config, topology: Topology) -> Native:
    return (
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": cfg.sharding.min_unit_params} if _by_size(cfg) else {}
    )


def _dtype(argument: str, name: str) -> Native:
    return {"mixed_precision": {argument: DTYPES[name]}}


def _offloaded(cfg: Config) -> bool:
    return "cpu" in (cfg.offload.params, cfg.offload.optimizer)


def _own(cfg: Config, topology: Topology) -> Native:
    """The settings in `native.fsdp` that are arguments; the others are calls in the script."""
    policy: Mapping[str, Any] = cfg.native.get("fsdp", {}).get("mp_policy", {})
    return {"mixed_precision": dict(policy)} if policy else {}


_NEAREST = "reshard_after_forward: false"
_BETWEEN = "FSDP shards parameters between steps and gathers them in every forward"

_OWN: Mapping[str, Rule] = {
    "backend": row(Fit.EXACT, "version", "FSDP2", to=lambda cfg, topology: {"version": 2}),
    "sharding.strategy": exact(
        "reshard_after_forward, mesh",
        equivalent(
            "no_shard",
            lambda cfg: not sharded(cfg),
            "a mesh that only replicates; equals DistributedDataParallel except for rounding",
        ),
        approximate(
            *is_("sharding.strategy", "shard_optimizer"), f"{_NEAREST}: {_BETWEEN}, and reduces every micro-batch"
        ),
        approximate(
            "shard_grad_op or hybrid_shard_grad_op",
            lambda cfg: cfg.sharding.within_group == "shard_grad_op",
            f"{_NEAREST}: {_BETWEEN}",
        ),
        to=lambda cfg, topology: _reshard(cfg, topology) | _mesh(cfg, topology),
    ),
    "sharding.group_size": exact("mesh.shard"),
    "sharding.reshard_after_forward": Rule(
        Fit.EXACT, "reshard_after_forward", "a number is the size of a smaller group"
    ),
    "sharding.units": row(
        Fit.EXACT,
        "auto_wrap_policy, transformer_layer_cls_to_wrap",
        "auto is TRANSFORMER_BASED_WRAP, which takes the model's _no_split_modules",
        to=_units,
    ),
    "sharding.min_unit_params": row(
        Fit.EQUIVALENT,
        "min_num_params",
        "FSDP makes units of any module of this size, not only blocks",
        equivalent(
            "beside class names",
            lambda cfg: not _by_size(cfg),
            "FSDP has no minimum size with class names; same maths with smaller units",
        ),
        to=_least,
    ),
    "sharding.conditional_modules": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "do not call fully_shard on them; call set_reduce_scatter_unused_params(True) on the root",
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "sharding.replicate": "pass these parameters to each fully_shard as ignored_params, cast them, and average "
            "their gradients over the ranks before each update"
        },
    ),
    "precision.compute": exact(
        "mixed_precision.param_dtype",
        to=lambda cfg, topology: _dtype("param_dtype", cfg.precision.compute) if mixed(cfg) else {},
    ),
    "precision.master": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "cast the model to this dtype before fully_shard",
        unless("compute is fp32", lambda cfg: not mixed(cfg)),
        unless("fp32", lambda cfg: cfg.precision.master == "fp32", "if the training script loads the model in fp32"),
    ),
    "precision.reduce": exact(
        "mixed_precision.reduce_dtype",
        to=lambda cfg, topology: _dtype("reduce_dtype", cfg.precision.reduce) if mixed(cfg) else {},
    ),
    "precision.accumulate": exact(
        "dtype of the parameters' gradients",
        approximate(
            "not that of master",
            lambda cfg: cfg.precision.accumulate != cfg.precision.master,
            "FSDP2 accumulates gradients in the master dtype, which is more exact",
        ),
    ),
    "precision.cast_inputs": row(
        Fit.EXACT,
        "mixed_precision.cast_forward_inputs",
        "in 16 bits FSDP also casts the other arguments of units, such as rotary tables",
        needs_input(
            "names",
            lambda cfg: not isinstance(cfg.precision.cast_inputs, bool),
            "FSDP2 only knows all and none: false is written; cast the named arguments in the training script",
        ),
        to=lambda cfg, topology: (
            {"mixed_precision": {"cast_forward_inputs": False}} if cfg.precision.cast_inputs is False else {}
        ),
    ),
    "precision.keep_fp32": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "call fully_shard on the modules of these parameters with a policy without param_dtype, and cast around them",
        unless(
            "auto", lambda cfg: cfg.precision.keep_fp32 == "auto", "unless the class of a transformers model names some"
        ),
        unless("empty", lambda cfg: not cfg.precision.keep_fp32),
    ),
    "precision.buffers": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "cast the model's floating-point buffers before fully_shard; FSDP2 casts none",
    ),
    **moved_together("cpu_offload", lambda cfg, topology: {"cpu_offload": True} if _offloaded(cfg) else {}),
    "offload.pin_memory": exact(
        "pin_memory",
        to=lambda cfg, topology: {"pin_memory": cfg.offload.pin_memory} if _offloaded(cfg) else {},
    ),
    "offload.nvme_path": no_key(NO_FILES, fit=Fit.UNSUPPORTED),
    "offload.activations": exact(
        "activation_checkpointing_offload",
        needs_input(
            "cpu without recomputation",
            lambda cfg: cfg.offload.activations == "cpu" and cfg.activation_checkpointing == "none",
            "is only read with activation_checkpointing; call the model under torch.autograd.graph.save_on_cpu()",
        ),
        to=lambda cfg, topology: (
            {"activation_checkpointing_offload": True}
            if cfg.offload.activations == "cpu" and cfg.activation_checkpointing != "none"
            else {}
        ),
    ),
    "activation_checkpointing": exact(
        "activation_checkpointing",
        unless("full", lambda cfg: cfg.activation_checkpointing == "full", "of the units"),
        unless("the units by name", lambda cfg: cfg.activation_checkpointing == cfg.sharding.units, "of the units"),
        equivalent(
            *is_("activation_checkpointing", "selective"),
            "recomputes the units completely: same results, less memory, more time",
        ),
        equivalent(
            "other classes",
            lambda cfg: True,
            "recomputes the units, not these classes: same results, other memory and time",
        ),
        to=lambda cfg, topology: {} if cfg.activation_checkpointing == "none" else {"activation_checkpointing": True},
    ),
    "training.nonfinite": nonfinite_unchecked(
        Fit.NEEDS_INPUT, SCRIPT, "check that clip_grad_norm_ returns a finite norm before optimizer.step()"
    ),
    **noted(
        {
            "training.gradient_accumulation_steps": "divide the loss by it, and step after as many backward calls",
            "training.gradient_clipping": "torch.nn.utils.clip_grad_norm_(model.parameters(), ...) before the step",
            "optimizer.name": "build it after fully_shard",
            "compile.mode": "block.compile() before fully_shard, or model.compile()",
        }
    ),
    **saved_by_script("torch.distributed.checkpoint.save(...)"),
    "native": exact(
        "mixed_precision, and calls of your training script",
        unless("nothing for fsdp", lambda cfg: not cfg.native.get("fsdp")),
        needs_input(
            "more than mp_policy",
            lambda cfg: set(cfg.native["fsdp"]) != {"mp_policy"},
            "call the method of each setting, such as set_requires_gradient_sync",
        ),
        to=_own,
    ),
}

RULES: Mapping[str, Rule] = rows(_OWN)
"""Rows for FSDP2's arguments and for the training script."""
