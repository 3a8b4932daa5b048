"""How a file of Accelerate says each field with FSDP2, or with replicas where nothing is sharded: one row for each leaf
of the schema.

Sources: accelerate 1.15.0, utils/dataclasses.py and utils/fsdp_utils.py. What the file has no key for stays with the
training script.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.fallbacks import FALLBACKS, noted, rows
from unishard.contract.field_rows import (
    BEFORE_EACH_FORWARD,
    BUFFERS,
    RESHARDS_TO_ALL,
    asked,
    exact,
    moved_together,
    nonfinite_unchecked,
    row,
    when_default,
)
from unishard.contract.rules import (
    NO_KEY,
    PURE,
    SCRIPT,
    Fit,
    Rule,
    approximate,
    equivalent,
    is_,
    needs_input,
    sharded,
    unless,
    unsupported,
)
from unishard.formats.accelerate import sequence
from unishard.formats.accelerate.script import BY_SCRIPT


def mixed(cfg: Config) -> bool:
    """Whether the model computes in another dtype than that of its master weights."""
    return cfg.precision.compute != "fp32" and not cfg.precision.pure


def _reduces_in_fp32(cfg: Config) -> bool:
    return _replicas(cfg) and mixed(cfg) and cfg.precision.reduce == "fp32"


def _replicas(cfg: Config) -> bool:
    return not sharded(cfg)


def _fsdp(cfg: Config, **keys: Any) -> Native:
    """Keys of the block `fsdp_config`, which only sharding has."""
    return {"fsdp_config": {f"fsdp_{key}": value for key, value in keys.items()}} if sharded(cfg) else {}


def _backend(cfg: Config, topology: Topology) -> Native:
    kind = "FSDP" if sharded(cfg) else "MULTI_GPU"
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, **_fsdp(cfg, version=2)}


def _offloads_activations(cfg: Config) -> bool:
    """Whether Accelerate takes what recomputation keeps to the host."""
    return cfg.offload.activations == "cpu" and cfg.activation_checkpointing != "none" and sharded(cfg)


def _strategy(cfg: Config, topology: Topology) -> Native:
    reshard = cfg.sharding.within_group == "full_shard" and cfg.sharding.reshard_after_forward is not False
    return _fsdp(cfg, reshard_after_forward=reshard) | _groups(cfg, topology)


def _groups(cfg: Config, topology: Topology) -> Native:
    """The mesh, where several groups hold a copy each, or ranks share samples."""
    world, sharing = topology.world_size, cfg.parallel.sequence.size
    group = (cfg.sharding.group_size or topology.local_world_size) if cfg.sharding.hybrid else world
    if not sharded(cfg) or world % group or group % sharing or (world <= group and sharing == 1):
        return {}
    shared: Native = {} if sharing == 1 else {"cp_size": sharing, "cp_comm_strategy": "allgather"}
    return sequence.block(dp_replicate_size=max(world // group, 1), dp_shard_size=group // sharing, **shared)


def _units(cfg: Config, topology: Topology) -> Native:
    if cfg.sharding.units == "auto" and cfg.sharding.min_unit_params > 0:
        return _fsdp(cfg, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=cfg.sharding.min_unit_params)
    named = {} if cfg.sharding.units == "auto" else {"transformer_layer_cls_to_wrap": ",".join(cfg.sharding.units)}
    return _fsdp(cfg, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **named)


def _allows_tf32(cfg: Config) -> bool:
    """Whether Accelerate allows TF32 by itself (state.py, AcceleratorState)."""
    return cfg.compile.mode != "none" and not mixed(cfg)


def _compile(cfg: Config, topology: Topology) -> Native:
    if cfg.compile.mode == "none":
        return {}
    regional = {"dynamo_use_regional_compilation": True} if cfg.compile.mode == "per_block" else {}
    return {"dynamo_config": {"dynamo_backend": cfg.compile.backend.upper(), **regional}}


_BACKENDS = ("eager", "aot_eager", "inductor", "cudagraphs", "onnxrt", "tensorrt", "ipex", "tvm")
_NEAREST = "nearest is fsdp_reshard_after_forward: false; FSDP gathers in every forward"
_AUTOCAST = "torch.autocast keeps fp32 in chosen operations; the master weights are fp32 as well"

_SHARDING: Mapping[str, Rule] = {
    "backend": exact("distributed_type, fsdp_config.fsdp_version", to=_backend),
    "sharding.strategy": exact(
        "fsdp_config.fsdp_reshard_after_forward, parallelism_config",
        unless("no_shard", _replicas, "MULTI_GPU: DistributedDataParallel"),
        approximate(
            *is_("sharding.strategy", "shard_optimizer"), f"{_NEAREST}, and reduces gradients on every micro-batch"
        ),
        approximate(
            "shard_grad_op or hybrid_shard_grad_op", lambda cfg: cfg.sharding.within_group == "shard_grad_op", _NEAREST
        ),
        to=_strategy,
    ),
    "sharding.group_size": exact("parallelism_config.parallelism_config_dp_shard_size"),
    "sharding.reshard_after_forward": exact("fsdp_config.fsdp_reshard_after_forward", RESHARDS_TO_ALL),
    "sharding.units": row(
        Fit.EXACT,
        "fsdp_config.fsdp_auto_wrap_policy, fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "auto is TRANSFORMER_BASED_WRAP, which takes the model's _no_split_modules",
        to=_units,
    ),
    "sharding.min_unit_params": row(
        Fit.EQUIVALENT,
        "fsdp_config.fsdp_min_num_params",
        "with class names, FSDP has no minimum unit size; the same math, other units",
    ),
    **asked(
        Fit.APPROXIMATE,
        NO_KEY,
        {
            "sharding.conditional_modules": "no key; every rank must use all parameters of these modules in each step",
            "sharding.replicate": "no key: these are sharded too; fsdp_ignored_modules would train other weights on "
            "each rank",
        },
    ),
}

_PRECISION: Mapping[str, Rule] = {
    "precision.compute": exact(
        "mixed_precision",
        equivalent(*PURE, "mixed_precision: no computes in the model's dtype; load the model in this one"),
        approximate("no_shard in bf16 or fp16", lambda cfg: _replicas(cfg) and mixed(cfg), _AUTOCAST),
        to=lambda cfg, topology: {"mixed_precision": cfg.precision.compute if mixed(cfg) else "no"},
    ),
    "precision.master": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "load the model in this dtype (torch_dtype of from_pretrained)",
        unless("mixed", mixed, "Accelerate casts trainable parameters to fp32"),
        when_default("precision.compute", "as long as the training script loads fp32"),
    ),
    "precision.reduce": row(
        Fit.APPROXIMATE,
        "mixed_precision",
        "Accelerate reduces in the compute dtype",
        unless("fp32 with no_shard", _reduces_in_fp32, "the gradients are fp32"),
        equivalent("no_shard", lambda cfg: _replicas(cfg) and mixed(cfg), "reduced in fp32, which is more exact"),
        unless("that of compute", lambda cfg: cfg.precision.reduce == cfg.precision.compute),
    ),
    "precision.matmul": FALLBACKS["precision.matmul"]._replace(
        when=(
            unless(
                "tf32 with compile in fp32",
                lambda cfg: _allows_tf32(cfg) and cfg.precision.matmul == "tf32",
                "Accelerate allows it",
            ),
            needs_input(
                "keep with compile in fp32",
                lambda cfg: _allows_tf32(cfg) and cfg.precision.matmul == "keep",
                "Accelerate then allows TF32; after Accelerator(), call torch.set_float32_matmul_precision('highest') "
                "to forbid it",
            ),
            *FALLBACKS["precision.matmul"].when,
        )
    ),
    "precision.accumulate": exact(
        "dtype of the parameters' gradients",
        approximate(
            "not that of master",
            lambda cfg: cfg.precision.accumulate != cfg.precision.master,
            "FSDP2 adds gradients up in the dtype of the master weights, which is more exact",
        ),
        approximate(
            "mixed, with accumulation",
            lambda cfg: mixed(cfg) and sharded(cfg) and cfg.training.gradient_accumulation_steps > 1,
            "accumulates in the reduce dtype; GradientAccumulationPlugin(sync_each_batch=True)",
        ),
    ),
}

_SEQUENCE: Mapping[str, Rule] = {
    "parallel.sequence.size": row(
        Fit.APPROXIMATE,
        f"parallelism_config.{sequence.name_of('cp')}",
        "the script calls the model and backward inside accelerator.maybe_context_parallel(...), with labels that it "
        "has shifted, and weighs each rank's loss by its tokens; Trainer does it",
        when_default("parallel.sequence.size"),
        unsupported("no_shard", _replicas, f"{sequence.REQUIRED_ENGINE['cp']}; set sharding.strategy"),
        to=_groups,
    ),
    "parallel.sequence.method": row(
        Fit.EQUIVALENT,
        "parallelism_config.parallelism_config_cp_comm_strategy",
        "Accelerate gathers keys and values there: the same math, other traffic",
        unless(*is_("parallel.sequence.method", "allgather")),
    ),
    **sequence.BY_SCRIPT,
}

_LOOP: Mapping[str, Rule] = {
    **moved_together(
        "fsdp_config.fsdp_offload_params",
        lambda cfg, topology: _fsdp(cfg, offload_params=("cpu" in (cfg.offload.params, cfg.offload.optimizer))),
    ),
    "offload.activations": exact(
        "fsdp_config.fsdp_activation_checkpointing_offload",
        needs_input(
            "cpu without recomputation, or with no_shard",
            lambda cfg: cfg.offload.activations == "cpu" and not _offloads_activations(cfg),
            "is only read with fsdp_activation_checkpointing; call the model under torch.autograd.graph.save_on_cpu()",
        ),
        to=lambda cfg, topology: (
            _fsdp(cfg, activation_checkpointing_offload=True) if _offloads_activations(cfg) else {}
        ),
    ),
    "activation_checkpointing": row(
        Fit.EXACT,
        "fsdp_config.fsdp_activation_checkpointing",
        "of the units",
        needs_input("no_shard", _replicas, "MULTI_GPU has no such key; model.gradient_checkpointing_enable()"),
        unless("the units", lambda cfg: cfg.activation_checkpointing in ("full", cfg.sharding.units), "of the units"),
        equivalent(
            "selective, or other classes",
            lambda cfg: True,
            "full units are recomputed: the same results, other memory and time",
        ),
        to=lambda cfg, topology: _fsdp(cfg, activation_checkpointing=cfg.activation_checkpointing != "none"),
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "training.gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps=...) and "
            "accelerator.accumulate(model)",
            "training.gradient_clipping": "accelerator.clip_grad_norm_(...) where accelerator.sync_gradients",
        },
    ),
    "training.nonfinite": nonfinite_unchecked(
        Fit.APPROXIMATE,
        NO_KEY,
        "torch steps with infinite or NaN gradients; check what clip_grad_norm_ returns",
        approximate(
            "raise in fp16", lambda cfg: cfg.precision.compute == "fp16", "GradScaler skips it without an error"
        ),
    ),
    "training.buffers": BUFFERS._replace(
        when=(
            needs_input(
                "local with no_shard",
                lambda cfg: _replicas(cfg) and cfg.training.buffers == "local",
                "pass DistributedDataParallelKwargs(broadcast_buffers=False) in kwargs_handlers of the Accelerator",
            ),
            *BUFFERS.when,
            equivalent("rank0 with no_shard", _replicas, BEFORE_EACH_FORWARD),
        )
    ),
    "compile.mode": exact(
        "dynamo_config",
        needs_input("a backend without a word", lambda cfg: cfg.compile.backend not in _BACKENDS, "call torch.compile"),
        to=_compile,
    ),
    "compile.backend": exact(
        "dynamo_config.dynamo_backend",
        needs_input("one without a word", lambda cfg: cfg.compile.backend not in _BACKENDS, "call torch.compile"),
    ),
}

_NOTES = noted(
    {
        "precision.initial_loss_scale": "pass GradScalerKwargs(init_scale=...) in kwargs_handlers of the Accelerator",
        "precision.loss_scale_growth_interval": "pass GradScalerKwargs(growth_interval=...) in kwargs_handlers of the "
        "Accelerator",
        "native": "no key for it; pass it to the fsdp_plugin of the Accelerator",
    }
)

FSDP_RULES: Mapping[str, Rule] = rows(_SHARDING, _PRECISION, _SEQUENCE, _LOOP, BY_SCRIPT, _NOTES)
"""Rows in the order of the schema."""
