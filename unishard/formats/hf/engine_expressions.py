"""What `fsdp_config` and `deepspeed` say: the engine's own words, but for what transformers does not hand on (transformers 5.23)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unishard.config import Config
from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem
from unishard.formats.hf.sharding import BOTH
from unishard.formats.reading import ReadDocument
from unishard.mapping.express import AUTO, Expressed, FieldResult, express
from unishard.mapping.rules import NO_KEY, SCRIPT, Fit, Rule, When
from unishard.plugins import registry

__all__ = ["FSDP", "decided_of", "engine_of"]

_TIME = "time and memory alone: losses are the same"
_FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
_ZERO_WORDS = ("sharding.", "precision.", "offload.", "communication.", "training.nonfinite", "native")
"""Fields that DeepSpeed's config says; the others are TrainingArguments with it as well."""


def _sharded(cfg: Config) -> bool:
    return cfg.sharding.strategy != "no_shard"


def _mixed(cfg: Config) -> bool:
    return cfg.precision.compute != "fp32"


def _same(field: Callable[[Config], object], value: object, case: str) -> When:
    return When(case, lambda cfg: field(cfg) == value, Fit.EXACT, "")


def _scaled(cfg: Config) -> bool:
    return cfg.precision.compute == "fp16"


def _scaler(name: str, usual: object) -> Rule:
    return Rule(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "Trainer makes torch's GradScaler with its defaults; override create_accelerator_and_postprocess for other ones",
        when=(
            When("not fp16", lambda cfg: not _scaled(cfg), Fit.EXACT, "nothing is scaled"),
            When("torch's default", lambda cfg: bool(getattr(cfg.precision, name) == usual), Fit.EXACT, ""),
        ),
    )


FSDP: Mapping[str, Rule] = {
    "precision.master": Rule(
        Fit.EXACT,
        "bf16, fp16",
        when=(
            When(
                "pure",
                lambda cfg: cfg.precision.pure,
                Fit.NEEDS_INPUT,
                "load the model in this format (dtype=torch.bfloat16) and leave bf16 and fp16 out",
            ),
        ),
    ),
    "precision.reduce": Rule(
        Fit.EXACT,
        "bf16, fp16",
        when=(
            When("fp32 throughout", lambda cfg: not _mixed(cfg), Fit.EXACT, ""),
            When("no_shard in fp32", lambda cfg: not _sharded(cfg) and cfg.precision.reduce == "fp32", Fit.EXACT, ""),
            When("no_shard", lambda cfg: not _sharded(cfg), Fit.EQUIVALENT, "reduced in fp32, which is more exact"),
            When(
                "fp32",
                lambda cfg: cfg.precision.reduce == "fp32",
                Fit.APPROXIMATE,
                "Accelerate 1.15.0 reduces FSDP's gradients in the format of bf16 or fp16, which loses small ones",
            ),
        ),
    ),
    "precision.accumulate": Rule(
        Fit.EXACT,
        NO_KEY,
        when=(
            When("fp32 throughout", lambda cfg: not _mixed(cfg), Fit.EXACT, ""),
            When("no accumulation", lambda cfg: cfg.training.gradient_accumulation_steps == 1, Fit.EXACT, ""),
            When(
                "fp32 with fsdp",
                lambda cfg: _sharded(cfg) and cfg.precision.accumulate == "fp32",
                Fit.APPROXIMATE,
                "FSDP2 adds up what it has not reduced yet in the format of reduction (torch 2.13)",
            ),
            When("fp32 without fsdp", lambda cfg: cfg.precision.accumulate == "fp32", Fit.EXACT, ""),
            When("else", lambda cfg: not _sharded(cfg), Fit.EQUIVALENT, "gradients are added up in fp32, which is more exact"),
        ),
    ),
    "precision.buffers": Rule(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "cast the model's floating-point buffers before Trainer gets it",
        when=(_same(lambda cfg: cfg.precision.buffers, "keep", "keep"),),
    ),
    "precision.loss_scale": _scaler("loss_scale", "dynamic"),
    "precision.initial_loss_scale": _scaler("initial_loss_scale", 65536.0),
    "precision.loss_scale_growth_interval": _scaler("loss_scale_growth_interval", 2000),
    "sharding.strategy": Rule(
        Fit.EXACT,
        "fsdp, fsdp_config.reshard_after_forward",
        "",
        when=(
            When("no_shard", lambda cfg: not _sharded(cfg), Fit.EXACT, "DistributedDataParallel"),
            When(
                "hybrid",
                lambda cfg: cfg.sharding.hybrid,
                Fit.NEEDS_INPUT,
                "pass parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...) of accelerate, which no file can hold",
            ),
            When(
                "shard_optimizer or shard_grad_op",
                lambda cfg: cfg.sharding.within_group != "full_shard",
                Fit.APPROXIMATE,
                "reshard_after_forward: false is the nearest: parameters lie in parts between steps and are gathered in every forward",
            ),
        ),
    ),
    "sharding.group_size": Rule(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "say it in that ParallelismConfig",
        when=(When("not hybrid", lambda cfg: not cfg.sharding.hybrid, Fit.EXACT, "there are no groups"),),
    ),
    "offload.pin_memory": Rule(
        Fit.IGNORED,
        NO_KEY,
        "TrainingArguments have no word for it: offloaded tensors are page-locked, which changes time alone",
        when=(_same(lambda cfg: cfg.offload.pin_memory, True, "true"),),
    ),
    "communication.reduce_bucket_size": Rule(Fit.IGNORED, NO_KEY, _TIME),
    "communication.prefetch_bucket_size": Rule(Fit.IGNORED, NO_KEY, _TIME),
    "communication.overlap": Rule(Fit.IGNORED, NO_KEY, _TIME),
    "communication.desync_check": Rule(Fit.IGNORED, NO_KEY, "a check of unishard's"),
    "communication.desync_timeout": Rule(Fit.IGNORED, NO_KEY, "a check of unishard's"),
}
"""Rows with `fsdp` or neither engine; fields that are not here are said in FSDP's own words below `fsdp_config`."""


_ALWAYS = ("backend", "sharding.strategy", "native")
"""Fields that every document says."""


def decided_of(rows: Mapping[str, Rule], reading: ReadDocument) -> Mapping[str, Rule]:
    """The rows of what the source decides: what it leaves to its training script stays with that."""
    return {path: row for path, row in rows.items() if path in reading.decided or path in _ALWAYS}


def engine_of(reading: ReadDocument, topology: Topology) -> Expressed:
    """The engine's part of the document, and its words.

    Raises:
        ConfigError: transformers does not know the engine.
    """
    name = reading.config.backend
    if name not in _ENGINES:
        what = f"transformers runs {' and '.join(_ENGINES)}, not {name}; give --set backend=fsdp"
        raise ConfigError([Problem("backend", what, "")])
    rows = decided_of(registry.get(name).expressions, reading)
    return _ENGINES[name](reading.config, express(rows, reading.config, topology, reading.undecided))


def _fsdp(cfg: Config, said: Expressed) -> Expressed:
    taken = {key: value for key, value in said.document.items() if key in BOTH and _sharded(cfg)}
    words = {
        name: word._replace(key=f"fsdp_config.{word.key}")
        for name, word in said.fields.items()
        if name.startswith(("sharding.", "offload.")) and name not in FSDP
    }
    document: Native = {"fsdp_config": {key: value for key, value in taken.items() if key != "activation_checkpointing"}} if taken else {}
    return Expressed(document, words)


def _deepspeed(cfg: Config, said: Expressed) -> Expressed:
    config = {key: value for key, value in said.document.items() if key not in ("optimizer", "scheduler")}
    # transformers fills these in from the arguments, and refuses two places that disagree.
    config = merge(config, dict.fromkeys(_FILLED, AUTO))
    for block in ("bf16", "fp16"):
        if block in config:
            config[block] = {**config[block], "enabled": AUTO}
    words: dict[str, FieldResult] = {
        name: word._replace(key=f"deepspeed.{word.key}") for name, word in said.fields.items() if name.startswith(_ZERO_WORDS)
    }
    words["backend"] = FieldResult(Fit.EXACT, "deepspeed", "")
    words.pop("precision.compute", None)
    return Expressed({"deepspeed": config}, words)


_ENGINES: Mapping[str, Callable[[Config, Expressed], Expressed]] = {"fsdp": _fsdp, "deepspeed": _deepspeed}
