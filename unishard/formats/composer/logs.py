"""What llm-foundry's loggers and profiler say, and how it says `logging` (Composer 0.32, loggers and profiler;
llm-foundry 0.22).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning, Undecided, Unreadable
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit, Rule
from unishard.contract.templates import placeholders_in
from unishard.formats.composer.durations import updates
from unishard.formats.fallbacks import row
from unishard.formats.log_tables import (
    NOT_LOGGED,
    NOT_PROFILED,
    consecutive,
    destinations,
    interval,
    interval_row,
    left,
    profiled_row,
    spans,
    text_rows,
    to_row,
)

__all__ = ["LOGGED", "LOGS"]

_FIELDS: Mapping[str, Mapping[str, str]] = {
    "wandb": {"project": "project", "entity": "wandb_entity", "group": "wandb_group", "name": "run_name"},
    "mlflow": {"experiment_name": "project", "run_name": "run_name", "tracking_uri": "mlflow_uri"},
    "tensorboard": {},
}
"""The arguments of each logger that `logging` has, with its fields; Composer's own words for them."""
_STEPS = 1
"""Composer logs each batch."""
_EVERY = "Composer logs each batch to its loggers; console_log_interval counts lines on the screen"
_CYCLE = {"wait": 0, "warmup": 1, "active": 4, "skip_first": 0}
"""Composer's cyclic_schedule if it is not set."""
_AGAIN = "Composer traces every cycle, here the first; set profile.steps"


def _loggers(given: Given) -> Mapping[str, Any]:
    said = given.get("loggers")
    return said if isinstance(said, Mapping) else {}


def _named(given: Given) -> list[str]:
    return [name for name in _loggers(given) if name in _FIELDS]


def _to(value: Any, given: Given) -> Meaning:
    if not isinstance(value, Mapping):
        return left()
    named = _named(given)
    folder = _argument(value.get("tensorboard"), "log_dir") or "runs"
    said = destinations(named, folder, others=[str(name) for name in value if name not in _FIELDS])
    if not said.fields:
        return said
    texts: dict[str, Any] = {}
    for name in named:
        texts = {
            f"logging.{field}": text for key, field in _FIELDS[name].items() if (text := _argument(value[name], key))
        } | texts
    if (
        "logging.run_name" not in texts
        and isinstance(run := given.get("run_name"), str)
        and {"wandb", "mlflow"} & {*named}
    ):
        texts |= {} if placeholders_in(run) or not run.strip() else {"logging.run_name": run}
    return said._replace(fields={**said.fields, **texts, "logging.every_steps": _every(given)})


def _argument(arguments: Any, key: str) -> str:
    """An argument of a logger, where it is a text."""
    value = arguments.get(key) if isinstance(arguments, Mapping) else None
    return value if isinstance(value, str) and value.strip() and not placeholders_in(value) else ""


def _every(given: Given) -> int:
    """How many batches lie between two lines on the screen, which count where a file says them."""
    try:
        found = updates(given.get("console_log_interval"), given)
    except Unreadable:
        return _STEPS
    return found if isinstance(found, int) and found > 0 else _STEPS


def _console(value: Any, given: Given) -> Meaning:
    found = updates(value, given)
    if isinstance(found, Undecided) or not found:
        return left(f"affects only logs; comes from {found.who}" if isinstance(found, Undecided) else "is off")
    return interval(found, _named(given), note=_EVERY)


def _profiled(value: Any, given: Given) -> Meaning:
    schedule = value.get("schedule") if isinstance(value, Mapping) else None
    if not isinstance(schedule, Mapping):
        return left("a schedule of its own; profile.steps traces chosen steps" if value else "is off")
    counts = {name: int(integer(0)(schedule.get(name, silent))) for name, silent in _CYCLE.items()}
    first = counts["skip_first"] + counts["wait"] + counts["warmup"] + 1
    folder = _argument(value, "torch_prof_folder") or _argument(value.get("json_trace_handler"), "folder") or "profile"
    fields: dict[str, Any] = {"profile.steps": consecutive(first, counts["active"]), "profile.dir": folder}
    if not counts["active"]:
        return left("is off")
    flags = {"torch_prof_record_shapes": "shapes", "torch_prof_profile_memory": "memory"}
    fields |= {f"profile.{field}": True for name, field in flags.items() if value.get(name) is True}
    return Meaning(Fit.APPROXIMATE, _AGAIN, fields, kept=True)


def _counts(what: str) -> Key:
    return Key(lambda value, given: left(what), "", Fit.IGNORED, what)


LOGGED: Mapping[str, Key] = {
    "loggers": Key(
        _to, "", Fit.EQUIVALENT, "logging.to: wandb, tensorboard, mlflow; logging.dir and the names of the run"
    ),
    "run_name": _counts("counts in loggers, and names checkpoints"),
    "console_log_interval": Key(_console, "", Fit.EQUIVALENT, "logging.every_steps"),
    **{name: _counts("affects only what is shown") for name in ("progress_bar", "log_to_console", "console_stream")},
    "profiler": Key(_profiled, "", Fit.APPROXIMATE, "profile.steps, profile.dir"),
}
"""What each key says."""


def _write(cfg: Config, topology: Topology) -> Native:
    loggers: Native = {}
    for name in cfg.logging.to:
        if name in _FIELDS:
            values = {key: getattr(cfg.logging, field) for key, field in _FIELDS[name].items()}
            folder = {"log_dir": cfg.logging.dir} if name == "tensorboard" else {}
            loggers[name] = {key: value for key, value in {**values, **folder}.items() if value is not None}
    return {"loggers": loggers} if loggers else {}


def _interval(cfg: Config, topology: Topology) -> Native:
    return {"console_log_interval": f"{cfg.logging.every_steps}ba"} if cfg.logging.to else {}


def _profile(cfg: Config, topology: Topology) -> Native:
    first, count = spans(cfg) or (0, 0)
    if not count:
        return {}
    warmup = min(1, first - 1)
    schedule = {"skip_first": 0, "wait": first - 1 - warmup, "warmup": warmup, "active": count, "repeat": 1}
    return {"profiler": {"schedule": schedule, "torch_prof_folder": cfg.profile.dir}}


LOGS: Mapping[str, Rule] = {
    "logging.to": to_row("loggers", "Composer", _write, lost={"jsonl": "Composer writes no such file"}),
    "logging.every_steps": interval_row(
        "console_log_interval", _interval, "Composer logs each batch to its loggers; its lines on the screen"
    ),
    "logging.dir": row(Fit.EXACT, "loggers.tensorboard.log_dir", "", NOT_LOGGED),
    **text_rows(
        {
            "project": {"wandb": "loggers.wandb.project", "mlflow": "loggers.mlflow.experiment_name"},
            "run_name": {"wandb": "loggers.wandb.name", "mlflow": "loggers.mlflow.run_name"},
            "wandb_entity": {"wandb": "loggers.wandb.entity"},
            "wandb_group": {"wandb": "loggers.wandb.group"},
            "mlflow_uri": {"mlflow": "loggers.mlflow.tracking_uri"},
        }
    ),
    "profile.steps": profiled_row(
        "profiler.schedule", "Composer", _profile, "also needs a trace handler of Composer's"
    ),
    "profile.dir": row(Fit.EXACT, "profiler.torch_prof_folder", "", NOT_PROFILED),
}
"""How each field is said."""
