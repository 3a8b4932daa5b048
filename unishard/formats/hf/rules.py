"""How TrainingArguments say each field of the config (transformers 5.23)."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config
from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.contract.field_rows import (
    BEFORE_EACH_FORWARD,
    BUFFERS,
    copied,
    exact,
    nonfinite_unchecked,
    rows,
    when_default,
)
from unishard.contract.render import FieldResult, Rendered, render
from unishard.contract.rules import NO_KEY, Fit, Rule, When, unless
from unishard.formats.hf.engine_rules import ENGINES, FSDP, decided_of, engine_of
from unishard.formats.hf.lengths import lengths_of
from unishard.formats.hf.optimizer_rules import OPTIMIZING
from unishard.formats.hf.saving import SAVING
from unishard.formats.hf.switches import FSDP_ON, switched_on, without
from unishard.formats.reading import ReadDocument

__all__ = ["RULES", "written"]


def _compute(cfg: Config, topology: Topology) -> Native:
    return {} if cfg.precision.compute == "fp32" else {cfg.precision.compute: True}


def _checkpointing(cfg: Config, topology: Topology) -> Native:
    if cfg.activation_checkpointing == "none":
        return {}
    if switched_on(cfg):
        return {"fsdp_config": {"activation_checkpointing": True}}
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


def _backend(cfg: Config, topology: Topology) -> Native:
    return FSDP_ON if switched_on(cfg) else {}


def _compiled(cfg: Config, topology: Topology) -> Native:
    return {} if cfg.compile.mode == "none" else {"torch_compile": True}


def _sent(cfg: Config, topology: Topology) -> Native:
    return (
        {"ddp_broadcast_buffers": cfg.training.buffers == "rank0"}
        if without(cfg) and cfg.training.buffers != "sync"
        else {}
    )


def _matmul(cfg: Config, topology: Topology) -> Native:
    if cfg.precision.matmul != "keep":
        return {"tf32": cfg.precision.matmul == "tf32"}
    return {"tf32": False} if cfg.compile.mode != "none" else {}


_NONE = when_default("activation_checkpointing")
_BLOCKS = "transformers recomputes full blocks: the same losses, other memory and time"

_OWN: Mapping[str, Rule] = {
    "backend": exact(
        "fsdp",
        unless("fsdp with no_shard", lambda cfg: cfg.sharding.strategy == "no_shard", "DistributedDataParallel"),
        to=_backend,
    ),
    "precision.compute": exact(
        "bf16, fp16",
        When(
            "pure",
            lambda cfg: cfg.precision.pure and cfg.backend == "fsdp",
            Fit.NEEDS_INPUT,
            "load the model in this dtype (dtype=torch.bfloat16) and leave bf16 and fp16 out",
        ),
        When(
            "no_shard on torch",
            lambda cfg: cfg.precision.compute != "fp32" and without(cfg),
            Fit.EQUIVALENT,
            "torch.autocast keeps some operations in fp32; without it all run in this dtype",
        ),
        to=_compute,
    ),
    "precision.matmul": exact(
        "tf32",
        When(
            "keep with compile",
            lambda cfg: cfg.precision.matmul == "keep" and cfg.compile.mode != "none",
            Fit.EQUIVALENT,
            "false, since Trainer switches TF32 on where it compiles; also keeps convolutions in fp32",
        ),
        when_default("precision.matmul"),
        When(
            "fp32",
            lambda cfg: cfg.precision.matmul == "fp32",
            Fit.EQUIVALENT,
            "Trainer then also keeps convolutions in fp32, which torch computes in TF32 by default",
        ),
        to=_matmul,
    ),
    "activation_checkpointing": exact(
        "activation_checkpointing, fsdp_config.activation_checkpointing",
        _NONE,
        When("selective", lambda cfg: cfg.activation_checkpointing == "selective", Fit.EQUIVALENT, _BLOCKS),
        When("classes", lambda cfg: isinstance(cfg.activation_checkpointing, list), Fit.EQUIVALENT, _BLOCKS),
        to=_checkpointing,
    ),
    "training.micro_batch_size": copied("training.micro_batch_size", "per_device_train_batch_size"),
    "training.gradient_accumulation_steps": copied(
        "training.gradient_accumulation_steps", "gradient_accumulation_steps"
    ),
    "training.global_batch_size": exact("per_device_train_batch_size x gradient_accumulation_steps x ranks"),
    "training.gradient_clipping": exact(
        "max_grad_norm", to=lambda cfg, topology: {"max_grad_norm": cfg.training.gradient_clipping or 0.0}
    ),
    "training.nonfinite": nonfinite_unchecked(
        Fit.APPROXIMATE,
        NO_KEY,
        "Trainer steps with NaN gradients; stop it in on_pre_optimizer_step of a callback",
        scaled=(Fit.EQUIVALENT, "torch's GradScaler leaves the update out"),
    ),
    "training.last_window": exact(
        "none: Trainer steps at the end of an epoch",
        When(
            "drop",
            lambda cfg: cfg.training.last_window == "drop",
            Fit.NEEDS_INPUT,
            "Trainer steps with a partial window at an epoch's end; cut the dataset to full ones",
        ),
    ),
    "training.buffers": BUFFERS._replace(
        key="ddp_broadcast_buffers",
        to=_sent,
        when=(*BUFFERS.when, When("rank0 with no_shard on torch", without, Fit.EQUIVALENT, BEFORE_EACH_FORWARD)),
    ),
    "training.seed": Rule(
        Fit.EQUIVALENT,
        "seed",
        "the same number; Trainer's sampler draws an order of its own from it",
        lambda cfg, topology: {"seed": cfg.training.seed},
    ),
    "compile.mode": exact(
        "torch_compile",
        When(
            "per_block",
            lambda cfg: cfg.compile.mode == "per_block",
            Fit.EQUIVALENT,
            "Trainer compiles the full model: the same results, a longer start",
        ),
        to=_compiled,
    ),
    "compile.backend": exact(
        "torch_compile_backend",
        to=lambda cfg, topology: {} if cfg.compile.mode == "none" else {"torch_compile_backend": cfg.compile.backend},
    ),
    "strict": exact("none: it is about unishard's own report"),
}

RULES: Mapping[str, Rule] = rows(FSDP, _OWN, OPTIMIZING, SAVING, without=ENGINES)
"""Rows of the arguments; with DeepSpeed, its own words stand in place of FSDP's."""


def written(reading: ReadDocument, topology: Topology) -> Rendered:
    """The arguments for a config, and what became of each field.

    Raises:
        ConfigError: transformers does not know the engine.
    """
    own_words = render(decided_of(RULES, reading), reading.config, topology, reading.undecided)
    engine = engine_of(reading, topology)
    lengths = lengths_of(reading)
    document = merge(merge(own_words.document, engine.document), lengths.document)
    words: dict[str, FieldResult] = {**own_words.fields, **engine.fields, **lengths.fields}
    return Rendered(document, words)
