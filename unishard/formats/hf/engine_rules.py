"""What `fsdp_config` and `deepspeed` say: the engine's own words, but for what transformers does not hand on
(transformers 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unishard.config import Config
from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.field_rows import RESHARDS_TO_ALL, exact, noted, row, when_default
from unishard.contract.render import AUTO, FieldResult, Rendered, render
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Rule, When, unless
from unishard.errors import ConfigError, Problem
from unishard.formats.defaults import without_unishards
from unishard.formats.hf.sharding import BOTH
from unishard.formats.reading import ReadDocument

__all__ = ["ENGINES", "FSDP", "decided_of", "engine_of"]

_FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
_ZERO_WORDS = ("sharding.", "precision.", "offload.", "communication.", "training.nonfinite", "native")
"""Fields that DeepSpeed's config says; the others are TrainingArguments with it as well."""
_NOT_ZERO = ("precision.matmul",)
"""A switch of torch, whatever the engine."""


def _sharded(cfg: Config) -> bool:
    return cfg.sharding.strategy != "no_shard"


def _mixed(cfg: Config) -> bool:
    return cfg.precision.compute != "fp32"


_SCALER = "GradScaler has its defaults; override Trainer.create_accelerator_and_postprocess"

FSDP: Mapping[str, Rule] = {
    **noted(
        dict.fromkeys(
            ("precision.loss_scale", "precision.initial_loss_scale", "precision.loss_scale_growth_interval"), _SCALER
        )
    ),
    "precision.master": exact(
        "bf16, fp16",
        When(
            "pure",
            lambda cfg: cfg.precision.pure,
            Fit.NEEDS_INPUT,
            "load the model in this dtype (dtype=torch.bfloat16) and leave bf16 and fp16 out",
        ),
    ),
    "precision.reduce": exact(
        "bf16, fp16",
        unless("fp32 throughout", lambda cfg: not _mixed(cfg)),
        unless("no_shard in fp32", lambda cfg: not _sharded(cfg) and cfg.precision.reduce == "fp32"),
        When("no_shard", lambda cfg: not _sharded(cfg), Fit.EQUIVALENT, "reduced in fp32, which is more exact"),
        When(
            "fp32",
            lambda cfg: cfg.precision.reduce == "fp32",
            Fit.APPROXIMATE,
            "Accelerate 1.15.0 reduces FSDP's gradients in bf16 or fp16, which loses small ones",
        ),
    ),
    "precision.accumulate": exact(
        NO_KEY,
        unless("fp32 throughout", lambda cfg: not _mixed(cfg)),
        when_default("training.gradient_accumulation_steps"),
        When(
            "fp32 with fsdp",
            lambda cfg: _sharded(cfg) and cfg.precision.accumulate == "fp32",
            Fit.APPROXIMATE,
            "FSDP2 accumulates unreduced gradients in the reduce dtype (torch 2.13)",
        ),
        when_default("precision.accumulate"),
        When(
            "else", lambda cfg: not _sharded(cfg), Fit.EQUIVALENT, "gradients are added up in fp32, which is more exact"
        ),
    ),
    "sharding.strategy": exact(
        "fsdp, fsdp_config.reshard_after_forward",
        unless("no_shard", lambda cfg: not _sharded(cfg), "DistributedDataParallel"),
        When(
            "hybrid",
            lambda cfg: cfg.sharding.hybrid,
            Fit.NEEDS_INPUT,
            "pass parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)",
        ),
        When(
            "shard_optimizer or shard_grad_op",
            lambda cfg: cfg.sharding.within_group != "full_shard",
            Fit.APPROXIMATE,
            "nearest is reshard_after_forward: false; FSDP gathers in every forward",
        ),
    ),
    "sharding.group_size": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "say it in that ParallelismConfig",
        unless("not hybrid", lambda cfg: not cfg.sharding.hybrid, "there are no groups"),
    ),
}
"""Rows with `fsdp` or neither engine."""

ENGINES = (
    *("sharding.reshard_after_forward", "sharding.units", "sharding.min_unit_params", "sharding.conditional_modules"),
    *("offload.params", "offload.optimizer", "offload.nvme_path"),
)
"""Fields that every engine says in its own words."""


_ALWAYS = ("backend", "sharding.strategy", "sharding.units", "native")
"""Fields that every document says, whichever tool the source is for."""


def decided_of(rows: Mapping[str, Rule], reading: ReadDocument) -> Mapping[str, Rule]:
    """The rows of what the source decides: what it leaves to its training script stays with that."""
    return {path: row for path, row in rows.items() if path in reading.decided or path in _ALWAYS}


def engine_of(reading: ReadDocument, topology: Topology) -> Rendered:
    """The engine's part of the document, and its words.

    Raises:
        ConfigError: transformers does not know the engine.
    """
    name = reading.config.backend
    if name not in _ENGINES:
        what = f"transformers runs {' and '.join(_ENGINES)}, not {name}; add --set backend=fsdp"
        raise ConfigError([Problem("backend", what, "")])
    rows = decided_of(registry.get(name).script_rules, reading)
    return _ENGINES[name](reading, render(rows, reading.config, topology, reading.undecided))


_RESHARD = "reshard_after_forward"


def _fsdp(reading: ReadDocument, said: Rendered) -> Rendered:
    cfg = reading.config
    taken = {key: value for key, value in said.document.items() if key in BOTH and _sharded(cfg)}
    words = {
        name: word._replace(key=f"fsdp_config.{word.key}") for name, word in said.fields.items() if name in ENGINES
    }
    if _RESHARD in taken and cfg.sharding.reshard_group is not None:  # Accelerate takes only true or false
        taken[_RESHARD] = True
        words[f"sharding.{_RESHARD}"] = FieldResult(
            RESHARDS_TO_ALL.fit, f"fsdp_config.{_RESHARD}", RESHARDS_TO_ALL.note
        )
    document: Native = (
        {"fsdp_config": {key: value for key, value in taken.items() if key != "activation_checkpointing"}}
        if taken
        else {}
    )
    return Rendered(document, words)


def _deepspeed(reading: ReadDocument, said: Rendered) -> Rendered:
    own = without_unishards(said.document, reading)
    config = {key: value for key, value in own.items() if key not in ("optimizer", "scheduler")}
    # transformers fills these in from the arguments, and refuses two places that disagree.
    config = merge(config, dict.fromkeys(_FILLED, AUTO))
    for block in ("bf16", "fp16"):
        if block in config:
            config[block] = {**config[block], "enabled": AUTO}
    of_zero = {
        name: word for name, word in said.fields.items() if name.startswith(_ZERO_WORDS) and name not in _NOT_ZERO
    }
    words: dict[str, FieldResult] = {name: word._replace(key=f"deepspeed.{word.key}") for name, word in of_zero.items()}
    words["backend"] = FieldResult(Fit.EXACT, "deepspeed", "")
    words.pop("precision.compute", None)
    return Rendered({"deepspeed": config}, words)


_ENGINES: Mapping[str, Callable[[ReadDocument, Rendered], Rendered]] = {"fsdp": _fsdp, "deepspeed": _deepspeed}
