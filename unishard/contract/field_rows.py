"""Rows of a table of rules: one neutral value and one sentence for each field that a tool has no key for, or leaves to
your training script.

A format, or an engine's arguments, write down only where they differ; `rows` fills in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from unishard.config import Config, Logging, Profile, leaves, value_at
from unishard.config.describe import shown
from unishard.config.nested import Native, nested
from unishard.config.topology import Topology
from unishard.contract.loop_rules import NOT_FP16
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Holds, Rule, Setting, When, unless

__all__ = [
    "BEFORE_EACH_FORWARD",
    "BUFFERS",
    "FALLBACKS",
    "NOT_FP16",
    "NO_FILES",
    "RESHARDS_TO_ALL",
    "asked",
    "copied",
    "endless",
    "exact",
    "keeps_more",
    "left_to_script",
    "lost",
    "moved_together",
    "no_key",
    "nonfinite_unchecked",
    "noted",
    "row",
    "rows",
    "saved_by_script",
    "started_elsewhere",
    "when_default",
]

_DEFAULT = Config()


# Builders of a row.


def when_default(path: str, note: str = "") -> When:
    """The case in which a field has the schema's default, which asks for nothing."""
    default = value_at(_DEFAULT, path)
    empty = not default and isinstance(default, list | tuple | dict)
    word = "empty" if empty else f"{default:g}" if isinstance(default, float) else shown(default).strip("'\"")
    return unless(word, lambda cfg: bool(value_at(cfg, path) == default), note)


def _nothing(cfg: Config, topology: Topology) -> Native:
    return {}


def row(fit: Fit, key: str, note: str, *when: When, to: Setting = _nothing, auto: bool = False) -> Rule:
    """A rule, with its cases after the note."""
    return Rule(fit, key, note, to, when, auto)


def exact(key: str, *when: When, to: Setting = _nothing, auto: bool = False) -> Rule:
    """A rule for a field that fits exactly, but for its cases."""
    return Rule(Fit.EXACT, key, "", to, when, auto)


def copied(path: str, key: str, note: str = "", *, when: tuple[When, ...] = (), auto: bool = False) -> Rule:
    """A row for a field that one key holds as it is; null is left out."""

    def to(cfg: Config, topology: Any) -> dict[str, Any]:
        value = value_at(cfg, path)
        return {} if value is None else nested({key: list(value) if isinstance(value, tuple) else value})

    return row(Fit.EXACT, key, note, *when, to=to, auto=auto)


def left_to_script(note: str, off: Holds | None = None, case: str = "", why: str = "") -> Rule:
    """A row for what the training script must do.

    Args:
        note: What to write there.
        off: Whether a config needs nothing.
        case: That condition in words.
        why: Why nothing is needed.
    """
    return Rule(Fit.NEEDS_INPUT, SCRIPT, note, when=(unless(case, off, why),) if off else ())


def no_key(note: str, off: Holds | None = None, case: str = "", fit: Fit = Fit.IGNORED) -> Rule:
    """A row for what the format has no key for.

    Args:
        note: Why nothing is lost, or what is.
        off: Whether a config asks for what happens anyway.
        case: That condition in words.
        fit: What is lost otherwise.
    """
    return Rule(fit, NO_KEY, note, when=(unless(case, off),) if off else ())


def lost(why: str, off: Holds, case: str) -> Rule:
    """A row for what the format does not support, unless a config does not need it."""
    return no_key(why, off, case, Fit.UNSUPPORTED)


def asked(fit: Fit, key: str, notes: Mapping[str, str]) -> dict[str, Rule]:
    """Rows that count only where a field does not have the schema's default, by field with its sentence."""
    return {path: row(fit, key, note, when_default(path)) for path, note in notes.items()}


# Conditions, cases and rows that several tables share.


def endless(cfg: Config) -> bool:
    """Whether the schedule has no end, so that the loop decides how long it runs."""
    return not cfg.scheduler.ends


def keeps_more(cfg: Config) -> bool:
    """Whether a config keeps more checkpoints than the newest: where a tool cannot, all are kept."""
    return cfg.checkpoint.keep_every is not None or cfg.checkpoint.keep_best is not None


NO_FILES = "PyTorch has no offload to files; choose cpu, or backend deepspeed"
BEFORE_EACH_FORWARD = "DistributedDataParallel sends them before each forward"
BUFFERS = Rule(
    Fit.NEEDS_INPUT,
    SCRIPT,
    "broadcast BatchNorm's running statistics from rank 0 before evaluation and saving",
    when=(
        unless("local", lambda cfg: cfg.training.buffers == "local"),
        When(
            "sync",
            lambda cfg: cfg.training.buffers == "sync",
            Fit.IGNORED,
            "only for models with BatchNorm: average its running statistics before evaluation and saving",
        ),
    ),
)
"""The row of `training.buffers` where nothing is done about buffers after the start."""
RESHARDS_TO_ALL = When(
    "a number",
    lambda cfg: cfg.sharding.reshard_group is not None,
    Fit.EQUIVALENT,
    "only true or false there: backward gathers among all ranks; pass the number to fully_shard",
)
"""The case of `sharding.reshard_after_forward` where a tool takes no smaller group."""


def moved_together(key: str, to: Setting, files: str = NO_FILES) -> dict[str, Rule]:
    """The rows of `offload.params` and `offload.optimizer` where one flag moves both to the host.

    Args:
        key: The flag.
        to: Writes it, if either is to lie there.
        files: Why nothing can lie in files.
    """
    other = {
        "params": f"{key} moves the optimizer's state as well, and its step to the host",
        "optimizer": f"{key} moves the parameters as well, which are copied to the device for each use",
    }
    return {f"offload.{what}": _moved(what, key, to, files, note) for what, note in other.items()}


def _moved(what: str, key: str, to: Setting, files: str, note: str) -> Rule:
    rest = "optimizer" if what == "params" else "params"
    return exact(
        key,
        unless("none", lambda cfg: getattr(cfg.offload, what) == "none"),
        When("nvme", lambda cfg: getattr(cfg.offload, what) == "nvme", Fit.UNSUPPORTED, files),
        When(
            f"cpu without offload.{rest}: cpu", lambda cfg: getattr(cfg.offload, rest) != "cpu", Fit.APPROXIMATE, note
        ),
        to=to,
    )


def nonfinite_unchecked(
    fit: Fit, key: str, note: str, *more: When, scaled: tuple[Fit, str] = (Fit.EXACT, "GradScaler does it")
) -> Rule:
    """The row of `training.nonfinite` where only torch's `GradScaler` looks at gradients, which only fp16 has.

    Args:
        fit: Without it.
        key: Where an update that is not finite can be stopped.
        note: How.
        more: Further cases.
        scaled: How well it does what `skip` asks.
    """
    return row(
        fit,
        key,
        note,
        unless("ignore", lambda cfg: cfg.training.nonfinite == "ignore"),
        When("skip in fp16", lambda cfg: cfg.training.nonfinite == "skip" and cfg.precision.compute == "fp16", *scaled),
        *more,
    )


def saved_by_script(call: str) -> dict[str, Rule]:
    """The rows of `checkpoint` where the training script saves.

    Args:
        call: What it calls for that, such as `accelerator.save_state(...)`.
    """
    notes = {
        "dir": f"the directory of {call}",
        "on_existing": f"look in that directory before {call} is called the first time",
        "every_steps": f"{call} whenever the number of updates is a multiple of it",
        "every_minutes": f"{call} by the clock of rank 0, broadcast to all ranks",
        "keep_last": "delete older checkpoints",
        "keep_every": "spare these from it",
        "keep_best": "spare those with the best metric from it",
        "on_signal": f"a handler (signal.signal) that sets a flag, and {call} after the update",
    }
    return {
        **asked(Fit.NEEDS_INPUT, SCRIPT, {f"checkpoint.{name}": note for name, note in notes.items()}),
        "checkpoint.best": left_to_script(
            "compare the metrics", lambda cfg: cfg.checkpoint.keep_best is None, "without keep_best"
        ),
        **asked(Fit.IGNORED, NO_KEY, {"checkpoint.async_save": "affects only time: training waits for the files"}),
    }


_JOB = "only unishard launch writes such a job; training is the same"
_STARTED = {
    "nodes": "pass torchrun --nnodes",
    "processes_per_node": "pass torchrun --nproc-per-node",
    "endpoint": "pass torchrun --rdzv-endpoint",
    "rendezvous": "pass torchrun --rdzv-backend",
    "rendezvous_id": "pass torchrun --rdzv-id",
    "rendezvous_options": "pass torchrun --rdzv-conf",
    "max_restarts": "pass torchrun --max-restarts",
    "environment": "export them before the launch",
    "slurm": _JOB,
    "kubernetes": _JOB,
}


def started_elsewhere(**options: str) -> dict[str, Rule]:
    """The rows of `launch` where another launcher starts the ranks, whose command line says what no config does.

    Args:
        options: What says each setting, or why nothing does, where that is not an option of torchrun.
    """
    return asked(Fit.IGNORED, NO_KEY, {f"launch.{name}": note for name, note in (_STARTED | options).items()})


# What stands for a field that a table does not speak of.


def _belongs(note: str, *names: str) -> Rule:
    """An argument that only some optimizers have."""
    case = unless(
        "another optimizer", lambda cfg: cfg.optimizer.name not in names, "the optimizer has no such argument"
    )
    return row(Fit.NEEDS_INPUT, SCRIPT, note, case)


def _scheduled(case: str, holds: Callable[[Config], bool]) -> Rule:
    return row(Fit.NEEDS_INPUT, SCRIPT, "build the learning rate schedule", unless(case, holds))


def _scaled(path: str, note: str) -> Rule:
    return row(Fit.NEEDS_INPUT, SCRIPT, note, NOT_FP16, when_default(path, "GradScaler's default"))


def _no_warmup(cfg: Config) -> bool:
    return not cfg.scheduler.warmup_steps


_IN_FP32 = unless("compute is fp32", lambda cfg: cfg.precision.compute == "fp32", "everything is in fp32")
_TIME = "affects only time and memory"
_GROUPS = "parameter groups of the optimizer"
_CHECK = "a check of collective calls by the training loop"
_KEPT = "the tool keeps the newest or all: all are kept"
_TRACES = "traces only; use torch.profiler"

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
            "precision.matmul": "call torch.set_float32_matmul_precision",
            "precision.reduce": "reduce gradients in this dtype",
            "precision.buffers": "cast the model's floating-point buffers before it is wrapped",
            "offload.params": "offload the parameters",
            "offload.optimizer": "offload the optimizer state",
            "activation_checkpointing": "checkpoint the model's blocks",
            "training.gradient_accumulation_steps": "accumulate gradients over micro-batches",
            "training.gradient_clipping": "clip the gradient norm",
            "training.last_window": "drop the batches that do not fill an accumulation window",
            "optimizer.amsgrad": "amsgrad of the optimizer",
            "optimizer.momentum": "momentum of the optimizer",
            "optimizer.nesterov": "nesterov of the optimizer",
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
        _IN_FP32,
        when_default("precision.cast_inputs"),
    ),
    "precision.keep_fp32": row(
        Fit.NEEDS_INPUT,
        SCRIPT,
        "leave these parameters in fp32, and cast around their modules",
        _IN_FP32,
        unless(
            "auto or empty",
            lambda cfg: cfg.precision.keep_fp32 in ("auto", []),
            "unless the class of the model names some",
        ),
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
    **saved_by_script("your save function"),
    **asked(Fit.APPROXIMATE, NO_KEY, {"checkpoint.keep_every": _KEPT, "checkpoint.keep_best": _KEPT}),
    **{
        path: no_key("affects only logs", lambda cfg: not cfg.logging.to, "nothing is logged")
        for path, _ in leaves(Logging, "logging.")
    },
    **{path: no_key(_TRACES, lambda cfg: not cfg.profile.steps, "no steps") for path, _ in leaves(Profile, "profile.")},
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
    **asked(Fit.UNSUPPORTED, NO_KEY, {"offload.nvme_path": NO_FILES}),
    "optimizer.betas": _belongs("betas of the optimizer", "adamw", "adam", "lion"),
    "optimizer.eps": _belongs("eps of the optimizer", "adamw", "adam", "adagrad"),
    "scheduler.name": _scheduled(
        "constant without warmup", lambda cfg: cfg.scheduler.name == "constant" and _no_warmup(cfg)
    ),
    "scheduler.warmup_steps": _scheduled("0", _no_warmup),
    "scheduler.warmup_type": _scheduled("no warmup", _no_warmup),
    "scheduler.warmup_start_ratio": _scheduled("no warmup", _no_warmup),
    "scheduler.delay_steps": _scheduled("0", lambda cfg: not cfg.scheduler.delay_steps),
    "scheduler.total_steps": _scheduled("without an end", endless),
    "scheduler.min_lr_ratio": _scheduled("without an end", endless),
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
    found = dict(FALLBACKS) | {path: row for table in own for path, row in table.items()}
    return {path: found[path] for path, _ in leaves(Config) if path not in without}
