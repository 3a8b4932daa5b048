"""The row of each field that a table of rules does not speak of: a tool has no key for it, or leaves it to your
training script.

A format, or an engine's arguments, write down only where they differ; `rows` fills in the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unishard.config import Config, Logging, Profile, Scheduler, leaves
from unishard.contract.field_rows import (
    BUFFERS,
    NO_FILES,
    asked,
    left_to_script,
    no_key,
    row,
    saved_by_script,
    started_elsewhere,
    when_default,
)
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Rule, unless


def _scaled(path: str, note: str) -> Rule:
    return row(Fit.NEEDS_INPUT, SCRIPT, note, when_default(path, "GradScaler's default"))


_SCHEDULE = "build the learning rate schedule"
_TIME = "affects only time and memory"
_GROUPS = "parameter groups of the optimizer"
_CHECK = "a check of collective calls by the training loop"
_KEPT = "the tool keeps the newest or all: all are kept"

FALLBACKS: Mapping[str, Rule] = {
    **{
        path: left_to_script(note)
        for path, note in {
            "backend": "set up the engine",
            "sharding.strategy": "shard the model",
            "precision.compute": "compute in this dtype",
            "precision.master": "load the model in this dtype",
            "training.micro_batch_size": "batch_size of the DataLoader, for each rank",
            "training.seed": "seed torch and the DataLoader",
            "optimizer.name": "build the optimizer",
            "optimizer.lr": "lr of the optimizer",
            "optimizer.weight_decay": "weight_decay of the optimizer",
        }.items()
    },
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "sharding.group_size": "build a device mesh with groups of this size",
            "sharding.reshard_after_forward": "pass it to fully_shard",
            "sharding.units": "shard modules of these classes",
            "sharding.conditional_modules": "leave modules of these classes out",
            "sharding.replicate": "leave these parameters out, and average their gradients over the ranks",
            "precision.matmul": "call torch.set_float32_matmul_precision",
            "precision.reduce": "reduce gradients in this dtype",
            "precision.buffers": "cast the model's floating-point buffers before it is wrapped",
            "quantization.type": "pass quantization_config=BitsAndBytesConfig(...) where the model is loaded",
            "quantization.double_quantization": "bnb_4bit_use_double_quant of BitsAndBytesConfig",
            "quantization.skip_modules": "llm_int8_skip_modules of BitsAndBytesConfig",
            "offload.params": "offload the parameters",
            "offload.optimizer": "offload the optimizer state",
            "offload.activations": "call the model under torch.autograd.graph.save_on_cpu(pin_memory=True)",
            "activation_checkpointing": "checkpoint the model's blocks",
            "training.gradient_accumulation_steps": "accumulate gradients over micro-batches",
            "training.batch_ramp": "accumulate over fewer micro-batches in the first updates",
            "training.gradient_clipping": "clip the gradient norm",
            "training.backward_calls": "call backward for each part of the loss, and reduce gradients in the last call",
            "training.loss_chunk_tokens": "compute the logits and the loss of a few tokens at a time",
            "training.last_window": "drop the batches that do not fill an accumulation window",
            "optimizer.amsgrad": "amsgrad of the optimizer",
            "optimizer.momentum": "momentum of the optimizer",
            "optimizer.nesterov": "nesterov of the optimizer",
            "optimizer.matrices": "parameters of Muon; the others are those of AdamW",
            "optimizer.adamw_lr": "lr of AdamW beside Muon",
            "optimizer.adjust_lr": "adjust_lr_fn of Muon",
            "optimizer.ns_steps": "ns_steps of Muon",
            "optimizer.ns_dtype": "dtype of Muon's iterations",
            "optimizer.no_decay": _GROUPS,
            "optimizer.groups": _GROUPS,
            "compile.mode": "call torch.compile",
            "compile.backend": "pass it to torch.compile",
        },
    ),
    "precision.cast_inputs": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "cast only these inputs to the compute dtype",
        when_default("precision.cast_inputs"),
    ),
    "precision.keep_fp32": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "leave these parameters in fp32, and cast around their modules",
        unless(
            "auto or empty",
            lambda cfg: cfg.precision.keep_fp32 in ("auto", []),
            "unless the class of the model names some",
        ),
    ),
    **asked(
        Fit.UNSUPPORTED,
        NO_KEY,
        {
            f"parallel.sequence.{name}": "each rank reads whole samples; set parallel.sequence to 1"
            for name in ("size", "method", "keys", "pad_to")
        }
        | {"parallel.sequence.recurrences": "recurrences of hybrid models are not split; set parallel.sequence to 1"}
        | {"parallel.expert.size": "each rank computes all experts; set parallel.expert to 1"}
        | {
            f"parallel.tensor.{name}": "each rank computes whole layers; set parallel.tensor to 1"
            for name in ("size", "plan")
        },
    ),
    "training.buffers": BUFFERS,
    "training.nonfinite": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "updates with infinite or NaN gradients are made",
        unless("ignore", lambda cfg: cfg.training.nonfinite == "ignore"),
    ),
    **asked(
        Fit.IGNORED,
        NO_KEY,
        {
            "offload.pin_memory": f"{_TIME}; FSDP always pins",
            "training.global_batch_size": "follows from the other sizes",
        },
    ),
    **{
        path: no_key(note)
        for path, note in {
            "communication.reduce_bucket_size": f"{_TIME}; FSDP reduces the gradients of a unit together",
            "communication.prefetch_bucket_size": f"{_TIME}; FSDP gathers the next unit ahead",
            "communication.overlap": f"{_TIME}; torch always overlaps",
            "communication.desync_check": _CHECK,
            "communication.desync_timeout": _CHECK,
            "strict": "controls unishard's own report",
        }.items()
    },
    **asked(
        Fit.NEEDS_INPUT,
        SCRIPT,
        {
            "communication.timeout": "start the process group with it: init_process_group(timeout=...), or "
            "InitProcessGroupKwargs(timeout=...) of Accelerate"
        },
    ),
    **saved_by_script("your save function"),
    **asked(Fit.APPROXIMATE, NO_KEY, {"checkpoint.keep_every": _KEPT, "checkpoint.keep_best": _KEPT}),
    **{path: no_key("affects only logs") for path, _ in leaves(Logging, "logging.")},
    **{path: no_key("traces only; use torch.profiler") for path, _ in leaves(Profile, "profile.")},
    **started_elsewhere(),
    **asked(Fit.EQUIVALENT, NO_KEY, {"sharding.min_unit_params": "the same math with smaller units"}),
    "precision.accumulate": row(
        Fit.APPROXIMATE,
        "none: the dtype of the master weights",
        "gradients add up in the dtype of the master weights, which is more exact",
        unless("that of master", lambda cfg: cfg.precision.accumulate == cfg.precision.master),
    ),
    "precision.loss_scale": _scaled(
        "precision.loss_scale", "torch's GradScaler has only a dynamic scale; scale the loss yourself"
    ),
    "precision.initial_loss_scale": _scaled("precision.initial_loss_scale", "init_scale of torch's GradScaler"),
    "precision.loss_scale_growth_interval": _scaled(
        "precision.loss_scale_growth_interval", "growth_interval of torch's GradScaler"
    ),
    "offload.nvme_path": no_key(NO_FILES, fit=Fit.UNSUPPORTED),
    "optimizer.betas": left_to_script("betas of the optimizer"),
    "optimizer.eps": left_to_script("eps of the optimizer"),
    **{path: left_to_script(_SCHEDULE) for path, _ in leaves(Scheduler, "scheduler.")},
    "scheduler.name": left_to_script(
        _SCHEDULE,
        lambda cfg: cfg.scheduler.name == "constant" and not cfg.scheduler.warmup_steps,
        "constant without warmup",
    ),
    **asked(Fit.NEEDS_INPUT, SCRIPT, {"scheduler.warmup_steps": _SCHEDULE, "scheduler.delay_steps": _SCHEDULE}),
    "native": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "no key for settings of the engine itself; set them in your training script",
        unless("nothing for the engine", lambda cfg: not cfg.native.get(cfg.backend)),
    ),
}
"""By field."""


def noted(notes: Mapping[str, str]) -> dict[str, Rule]:
    """Fallbacks with a note that names what the tool itself has for it."""
    return {path: FALLBACKS[path]._replace(note=note) for path, note in notes.items()}


def rows(*own: Mapping[str, Rule], without: Collection[str] = ()) -> dict[str, Rule]:
    """One row for each leaf of the config, in its order: a table's own, or the fallback.

    Args:
        own: Rows of the table; of two for one field, the last counts.
        without: Fields that another table says.
    """
    rules = dict(FALLBACKS) | {path: row for table in own for path, row in table.items()}
    return {path: rules[path] for path, _ in leaves(Config) if path not in without}
