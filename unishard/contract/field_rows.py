"""Builders of the rows of a table of rules, and the rows that several tables share.

The row of a field that a table does not speak of is in `fallbacks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config, value_at
from unishard.config.describe import shown
from unishard.config.nested import Native, nested
from unishard.config.topology import Topology
from unishard.contract.rules import NO_KEY, SCRIPT, Fit, Holds, Rule, Setting, When, unless

_DEFAULT = Config()


# Builders of a row.


def when_default(path: str, note: str = "") -> When:
    """The case in which a field has the schema's default, which asks for nothing."""
    default = value_at(_DEFAULT, path)
    empty = not default and isinstance(default, list | tuple | dict)
    value = "empty" if empty else f"{default:g}" if isinstance(default, float) else shown(default).strip("'\"")
    return unless(value, lambda cfg: bool(value_at(cfg, path) == default), note)


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


def left_to_script(note: str, off: Holds | None = None, case: str = "") -> Rule:
    """A row for what the training script must do.

    Args:
        note: What to write there.
        off: Whether a config needs nothing.
        case: That condition in words.
    """
    return Rule(Fit.NEEDS_INPUT, SCRIPT, note, when=(unless(case, off),) if off else ())


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


def keeps_more(cfg: Config) -> bool:
    """Whether a config keeps more checkpoints than the newest: where a tool cannot, all are kept."""
    return cfg.checkpoint.keep_every is not None or cfg.checkpoint.keep_best is not None


NO_FILES = "PyTorch has no offload to files; choose cpu, or backend deepspeed"
NO_STATE_IN_FILES = (
    "PyTorch has no offload to files, and DeepSpeed 0.19.8 makes other updates in them; choose cpu, or optimizer.name: "
    "adamw_8bit"
)
"""Of the optimizer's state, which no engine keeps in files."""
STATE_IN_FILES = "unishard's own: a file of each rank, read, stepped and written by pieces"
WEIGHTS_IN_FILES = "unishard's own: shards and fp32 master weights mapped on a file of each rank; the engine has cpu"
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
        When(
            "patterns",
            lambda cfg: not isinstance(cfg.training.buffers, str),
            Fit.NEEDS_INPUT,
            "merge these buffers over the ranks before evaluation and saving",
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


def moved_together(key: str, to: Setting) -> dict[str, Rule]:
    """The rows of `offload.params` and `offload.optimizer` where one flag moves both to the host.

    Args:
        key: The flag.
        to: Writes it, if either is to lie there.
    """
    notes = {
        "params": f"{key} moves the optimizer's state as well, and its step to the host",
        "optimizer": f"{key} moves the parameters as well, which are copied to the device for each use",
    }
    return {f"offload.{what}": _moved(what, key, to, note) for what, note in notes.items()}


def _moved(part: str, key: str, to: Setting, note: str) -> Rule:
    rest, files = ("optimizer", NO_FILES) if part == "params" else ("params", NO_STATE_IN_FILES)
    return exact(
        key,
        When("nvme", lambda cfg: getattr(cfg.offload, part) == "nvme", Fit.UNSUPPORTED, files),
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
        "copy_to": f"copy what {call} has written, by fsspec",
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
}


def started_elsewhere(**options: str) -> dict[str, Rule]:
    """The rows of `launch` where another launcher starts the ranks, whose command line says what no config does.

    Args:
        options: What says each setting, or why nothing does, where that is not an option of torchrun.
    """
    return asked(Fit.IGNORED, NO_KEY, {f"launch.{name}": note for name, note in (_STARTED | options).items()})
