"""How TrainingArguments say each field of the config (transformers 5.23)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from unishard.config import Config
from unishard.config.nested import Native, merge
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.fallbacks import noted, rows
from unishard.contract.field_rows import (
    BEFORE_EACH_FORWARD,
    BUFFERS,
    RESHARDS_TO_ALL,
    asked,
    copied,
    exact,
    left_to_script,
    nonfinite_unchecked,
    row,
    when_default,
)
from unishard.contract.render import AUTO, FieldResult, RenderedDocument, render
from unishard.contract.rules import (
    HYBRID,
    NO_KEY,
    PURE,
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
    unsupported,
)
from unishard.errors import ConfigError, Problem
from unishard.formats.engines.same import without_unishards
from unishard.formats.hf.kept import with_arguments
from unishard.formats.hf.loop import FSDP_ON, switched_on, without
from unishard.formats.hf.optimizing import OPTIMIZING
from unishard.formats.hf.saving import SAVING
from unishard.formats.hf.sharding import BOTH
from unishard.formats.names import each, names
from unishard.formats.reading.document import ReadDocument

_FILLED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
_ZERO_WORDS = names("sharding. precision. offload. communication. parallel.expert. training.nonfinite native")
"""Fields that DeepSpeed's config says; the others are TrainingArguments with it as well."""
_NOT_IN_CONFIG = (
    *("optimizer", "scheduler"),
    *("sequence_parallel_size", "data_parallel_size", "seq_parallel_communication_data_type"),
)
"""What Trainer hands to DeepSpeed itself."""
_NOT_ZERO = ("precision.matmul", "offload.activations", "communication.timeout")
"""What Trainer says beside the engine, whatever that is."""


_METHODS = {"fsdp": "allgather", "deepspeed": "ulysses"}
_SCALER = "GradScaler has its defaults; override Trainer.create_accelerator_and_postprocess"

FSDP: Mapping[str, Rule] = {
    **noted(each("precision.loss_scale precision.initial_loss_scale precision.loss_scale_growth_interval", _SCALER)),
    "precision.master": exact(
        "bf16, fp16",
        needs_input(*PURE, "load the model in this dtype (dtype=torch.bfloat16) and leave bf16 and fp16 out"),
    ),
    "precision.reduce": exact(
        "bf16, fp16",
        unless("fp32 throughout", lambda cfg: not mixed(cfg)),
        unless("no_shard in fp32", lambda cfg: not sharded(cfg) and cfg.precision.reduce == "fp32"),
        equivalent("no_shard", lambda cfg: not sharded(cfg), "reduced in fp32, which is more exact"),
        approximate(
            *is_("precision.reduce", "fp32"),
            "Accelerate 1.15.0 reduces FSDP's gradients in bf16 or fp16, which loses small ones",
        ),
    ),
    "precision.accumulate": exact(
        NO_KEY,
        unless("fp32 throughout", lambda cfg: not mixed(cfg)),
        when_default("training.gradient_accumulation_steps"),
        approximate(
            "fp32 with fsdp",
            lambda cfg: sharded(cfg) and cfg.precision.accumulate == "fp32",
            "FSDP2 accumulates unreduced gradients in the reduce dtype (torch 2.13)",
        ),
        when_default("precision.accumulate"),
        equivalent("else", lambda cfg: not sharded(cfg), "gradients are added up in fp32, which is more exact"),
    ),
    "sharding.strategy": exact(
        "fsdp, fsdp_config.reshard_after_forward",
        unless("no_shard", lambda cfg: not sharded(cfg), "DistributedDataParallel"),
        needs_input(*HYBRID, "pass parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"),
        approximate(
            "shard_optimizer or shard_grad_op",
            lambda cfg: cfg.sharding.within_group != "full_shard",
            "nearest is reshard_after_forward: false; FSDP gathers in every forward",
        ),
    ),
    "sharding.group_size": left_to_script("say it in that ParallelismConfig"),
    "parallel.sequence.size": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "pass parallelism_config=ParallelismConfig(cp_size=..., dp_shard_size=...), with deepspeed sp_size",
        when_default("parallel.sequence.size"),
        unsupported("no_shard on torch", without, "Trainer shares samples only with fsdp or deepspeed; write one"),
    ),
    "parallel.sequence.method": row(
        Fit.EQUIVALENT,
        SCRIPT,
        "cp_size gathers keys and values, sp_size exchanges heads: the same math, other traffic",
        unless("that of the engine", lambda cfg: cfg.parallel.sequence.method == _METHODS.get(cfg.backend)),
    ),
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "parallel.sequence.keys": "split these tensors of a batch",
            "parallel.sequence.pad_to": "pad_to_multiple_of of the data collator",
        },
    ),
}
"""Rows with `fsdp` or neither engine."""

ENGINES = (
    *("sharding.reshard_after_forward", "sharding.units", "sharding.min_unit_params", "sharding.conditional_modules"),
    "sharding.replicate",
    *("offload.params", "offload.optimizer", "offload.nvme_path"),
)
"""Fields that every engine says in its own words."""


_STRATEGY = "sharding.strategy"
_ALWAYS = ("backend", _STRATEGY, "sharding.units", "native")
"""Fields that every document says, whichever tool the source is for; the engine only where the strategy is known."""


def _decided_of(rows: Mapping[str, Rule], reading: ReadDocument) -> Mapping[str, Rule]:
    """The rows of what the source decides: what it leaves to its training script stays with that."""
    always = _ALWAYS[1:] if _STRATEGY in reading.undecided else _ALWAYS
    paths = {*always, *reading.decided.difference(_ALWAYS)}
    return {path: row for path, row in rows.items() if path in paths}


def _engine_of(reading: ReadDocument, topology: Topology) -> RenderedDocument:
    """The engine's part of the document, and its words.

    Raises:
        ConfigError: transformers does not know the engine.
    """
    name = reading.config.backend
    if name not in _ENGINES:
        message = f"transformers runs {' and '.join(_ENGINES)}, not {name}; add --set backend=fsdp"
        raise ConfigError([Problem("backend", message, "")])
    rows = _decided_of(registry.arguments(name).rules, reading)
    return _ENGINES[name](reading, render(rows, reading.config, topology, reading.undecided))


_RESHARD = "reshard_after_forward"


def _fsdp(reading: ReadDocument, rendered: RenderedDocument) -> RenderedDocument:
    cfg = reading.config
    on = sharded(cfg) and _STRATEGY not in reading.undecided
    taken = {key: value for key, value in rendered.document.items() if key in BOTH and on}
    words = {name: word.below("fsdp_config") for name, word in rendered.fields.items() if name in ENGINES}
    if _RESHARD in taken and cfg.sharding.reshard_group is not None:  # Accelerate takes only true or false
        taken[_RESHARD] = True
        words[f"sharding.{_RESHARD}"] = FieldResult.held(
            f"fsdp_config.{_RESHARD}", fit=RESHARDS_TO_ALL.fit, note=RESHARDS_TO_ALL.note
        )
    document: Native = (
        {"fsdp_config": {key: value for key, value in taken.items() if key != "activation_checkpointing"}}
        if taken
        else {}
    )
    return RenderedDocument(document, words)


def _deepspeed(reading: ReadDocument, rendered: RenderedDocument) -> RenderedDocument:
    own = without_unishards(rendered.document, reading)
    config = {key: value for key, value in own.items() if key not in _NOT_IN_CONFIG}
    # transformers fills these in from the arguments, and refuses two places that disagree.
    config = merge(config, dict.fromkeys(_FILLED, AUTO))
    for block in ("bf16", "fp16"):
        if block in config:
            config[block] = {**config[block], "enabled": AUTO}
    of_zero = {
        name: word for name, word in rendered.fields.items() if name.startswith(_ZERO_WORDS) and name not in _NOT_ZERO
    }
    words: dict[str, FieldResult] = {name: word.below("deepspeed") for name, word in of_zero.items()}
    words["backend"] = FieldResult.held("deepspeed")
    words.pop("precision.compute", None)
    return RenderedDocument({"deepspeed": config}, words)


_ENGINES: Mapping[str, Callable[[ReadDocument, RenderedDocument], RenderedDocument]] = {
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
}


def _checkpointing(cfg: Config, topology: Topology) -> Native:
    if cfg.activation_checkpointing == "none":
        return {}
    if switched_on(cfg):
        return {"fsdp_config": {"activation_checkpointing": True}}
    return {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


def _offloads_activations(cfg: Config) -> bool:
    return cfg.offload.activations == "cpu" and cfg.activation_checkpointing != "none" and not switched_on(cfg)


def _matmul(cfg: Config, topology: Topology) -> Native:
    if cfg.precision.matmul != "keep":
        return {"tf32": cfg.precision.matmul == "tf32"}
    return {"tf32": False} if cfg.compile.mode != "none" else {}


_BLOCKS = "transformers recomputes full blocks: the same losses, other memory and time"

_OWN: Mapping[str, Rule] = {
    "backend": exact(
        "fsdp",
        unless("fsdp with no_shard", lambda cfg: cfg.sharding.strategy == "no_shard", "DistributedDataParallel"),
        to=lambda cfg, topology: FSDP_ON if switched_on(cfg) else {},
    ),
    "precision.compute": exact(
        "bf16, fp16",
        needs_input(
            "pure",
            lambda cfg: cfg.precision.pure and cfg.backend == "fsdp",
            "load the model in this dtype (dtype=torch.bfloat16) and leave bf16 and fp16 out",
        ),
        equivalent(
            "no_shard on torch",
            lambda cfg: cfg.precision.compute != "fp32" and without(cfg),
            "torch.autocast keeps some operations in fp32; without it all run in this dtype",
        ),
        to=lambda cfg, topology: {} if cfg.precision.compute == "fp32" else {cfg.precision.compute: True},
    ),
    "precision.matmul": exact(
        "tf32",
        equivalent(
            "keep with compile",
            lambda cfg: cfg.precision.matmul == "keep" and cfg.compile.mode != "none",
            "false, since Trainer switches TF32 on where it compiles; also keeps convolutions in fp32",
        ),
        when_default("precision.matmul"),
        equivalent(
            *is_("precision.matmul", "fp32"),
            "Trainer then also keeps convolutions in fp32, which torch computes in TF32 by default",
        ),
        to=_matmul,
    ),
    "offload.activations": exact(
        "activation_checkpointing_kwargs",
        needs_input(
            "cpu with fsdp",
            lambda cfg: (
                cfg.offload.activations == "cpu" and cfg.activation_checkpointing != "none" and switched_on(cfg)
            ),
            "set FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true in the environment, which Accelerate 1.15.0 reads",
        ),
        needs_input(
            "cpu without recomputation",
            lambda cfg: cfg.offload.activations == "cpu" and cfg.activation_checkpointing == "none",
            "transformers offloads what recomputation keeps; call the model under torch.autograd.graph.save_on_cpu()",
        ),
        to=lambda cfg, topology: (
            {"activation_checkpointing_kwargs": {"offload": True}} if _offloads_activations(cfg) else {}
        ),
    ),
    "activation_checkpointing": exact(
        "activation_checkpointing, fsdp_config.activation_checkpointing",
        equivalent(*is_("activation_checkpointing", "selective"), _BLOCKS),
        equivalent("classes", lambda cfg: isinstance(cfg.activation_checkpointing, list), _BLOCKS),
        to=_checkpointing,
    ),
    "training.micro_batch_size": copied("training.micro_batch_size", "per_device_train_batch_size"),
    "training.gradient_accumulation_steps": copied(
        "training.gradient_accumulation_steps", "gradient_accumulation_steps"
    ),
    "training.batch_ramp": exact(
        "none: every update has gradient_accumulation_steps",
        needs_input(
            "set",
            lambda cfg: cfg.training.batch_ramp is not None,
            "Trainer has one number for all updates",
        ),
    ),
    "training.global_batch_size": exact("per_device_train_batch_size x gradient_accumulation_steps x ranks"),
    "training.gradient_clipping": exact(
        "max_grad_norm", to=lambda cfg, topology: {"max_grad_norm": cfg.training.gradient_clipping or 0.0}
    ),
    "communication.timeout": exact(
        "ddp_timeout",
        to=lambda cfg, topology: (
            {} if cfg.communication.timeout is None else {"ddp_timeout": math.ceil(cfg.communication.timeout)}
        ),
    ),
    "training.backward_calls": exact(
        "none: one call for each micro-batch",
        needs_input("several", lambda cfg: cfg.training.backward_calls > 1, "add up the losses in compute_loss"),
    ),
    "training.loss_chunk_tokens": exact(
        "none: the logits of all tokens are made",
        needs_input(
            "set",
            lambda cfg: cfg.training.loss_chunk_tokens is not None,
            "the same losses; use_liger_kernel saves this memory, in chunks of its own size",
        ),
    ),
    "training.nonfinite": nonfinite_unchecked(
        Fit.APPROXIMATE,
        NO_KEY,
        "Trainer steps with NaN gradients; stop it in on_pre_optimizer_step of a callback",
        scaled=(Fit.EQUIVALENT, "torch's GradScaler leaves the update out"),
    ),
    "training.last_window": exact(
        "none: Trainer steps at the end of an epoch",
        needs_input(
            *is_("training.last_window", "drop"),
            "Trainer steps with a partial window at an epoch's end; cut the dataset to full ones",
        ),
    ),
    "training.buffers": BUFFERS._replace(
        key="ddp_broadcast_buffers",
        to=lambda cfg, topology: (
            {"ddp_broadcast_buffers": cfg.training.buffers == "rank0"}
            if without(cfg) and cfg.training.buffers in ("rank0", "local")
            else {}
        ),
        when=(*BUFFERS.when, equivalent("rank0 with no_shard on torch", without, BEFORE_EACH_FORWARD)),
    ),
    "training.seed": Rule(
        Fit.EQUIVALENT,
        "seed",
        "the same number; Trainer's sampler draws an order of its own from it",
        lambda cfg, topology: {"seed": cfg.training.seed},
    ),
    "compile.mode": exact(
        "torch_compile",
        equivalent(
            *is_("compile.mode", "per_block"), "Trainer compiles the full model: the same results, a longer start"
        ),
        to=lambda cfg, topology: {} if cfg.compile.mode == "none" else {"torch_compile": True},
    ),
    "compile.backend": exact(
        "torch_compile_backend",
        to=lambda cfg, topology: {} if cfg.compile.mode == "none" else {"torch_compile_backend": cfg.compile.backend},
    ),
    "strict": exact("none: it is about unishard's own report"),
}

_WHOLE = "training.global_batch_size"
_SIZES = ("training.micro_batch_size", "training.gradient_accumulation_steps")
"""Of which it is the product."""

RULES: Mapping[str, Rule] = rows(FSDP, _OWN, OPTIMIZING, SAVING, without=ENGINES)
"""Rows of the arguments; with DeepSpeed, its own words stand in place of FSDP's."""


def render_arguments(reading: ReadDocument, topology: Topology, to: str) -> RenderedDocument:
    """The arguments for a config in a format that holds them, and what became of each field.

    Raises:
        ConfigError: transformers does not know the engine.
    """
    own_words = render(_decided_of(RULES, reading), reading.config, topology, reading.undecided)
    engine = _engine_of(reading, topology)
    words: dict[str, FieldResult] = {**own_words.fields, **engine.fields}
    if _WHOLE in words:
        words[_WHOLE] = words[_WHOLE]._replace(
            keys=tuple(key for size in _SIZES if size in words for key in words[size].keys)
        )
    return with_arguments(RenderedDocument(merge(own_words.document, engine.document), words), reading, to)
