"""What torchtitan's [metrics] and [profiling] say, and how they say it (torchtitan 0.2, components/metrics.py and
tools/profiling.py).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit, Rule, When
from unishard.contract.templates import placeholders_in
from unishard.formats.fallbacks import row
from unishard.formats.log_tables import (
    NOT_PROFILED,
    consecutive,
    destinations,
    interval,
    interval_row,
    left,
    profiled_row,
    spans,
    to_row,
    without_field,
)

__all__ = ["LOGGED", "LOGS"]

_DUMP = "./outputs"
_SWITCHES = {"tensorboard": "metrics.enable_tensorboard", "wandb": "metrics.enable_wandb"}
_CONSOLE = "rank 0 writes one line, updated in place"
_FREQUENCY, _ACTIVE = 10, 1
"""torchtitan's cycle of profiled steps if it is not set."""
_AGAIN = "torchtitan traces the last steps of every cycle, here those of the first; set profile.steps"
_ENVIRONMENT = "its project, team and run name are WANDB_PROJECT, WANDB_TEAM and WANDB_RUN_NAME"
_NAMES = "the same values under other names"


def _on(given: Given, key: str) -> bool:
    return given.get(key) in (True, "true")


def _named(given: Given) -> list[str]:
    return [name for name, key in _SWITCHES.items() if _on(given, key)]


def _below(given: Given, key: str, silent: str) -> str:
    """A folder below job.dump_folder."""
    parts = [str(given.get("job.dump_folder") or _DUMP), str(given.get(key) or silent)]
    return "runs" if any(map(placeholders_in, parts)) else posixpath.join(*parts)


def _switch(name: str) -> Key:
    """A key that switches a destination on; the first that is on says all of them."""

    def read(value: Any, given: Given) -> Meaning:
        named = _named(given)
        if not named or named[0] != name:
            return left()
        note = f"{_NAMES}; {_ENVIRONMENT}" if "wandb" in named else ""
        return destinations(named, _below(given, "metrics.save_tb_folder", "tb"), note=note)

    return Key(read, "", Fit.EQUIVALENT, f"logging.to: {name}")


def _profiling(value: Any, given: Given) -> Meaning:
    traces, snapshots = _on(given, "profiling.enable_profiling"), _on(given, "profiling.enable_memory_snapshot")
    if value not in (True, "true"):
        return left("is off")
    every = int(integer(1)(given.get("profiling.profile_freq") or _FREQUENCY))
    active = min(int(integer(1)(given.get("profiling.profiler_active") or _ACTIVE)), every)
    folder = (
        ("profiling.save_traces_folder", "profile_traces")
        if traces
        else ("profiling.save_memory_snapshot_folder", "memory_snapshot")
    )
    fields: dict[str, Any] = {
        "profile.steps": consecutive(every - active + 1, active),
        "profile.dir": _below(given, *folder),
    }
    fields |= {"profile.ranks": "all"} | ({"profile.memory": True} if snapshots else {})
    return Meaning(Fit.APPROXIMATE, _AGAIN, fields, kept=True)


_PART = "counts in profiling.enable_profiling"
LOGGED: Mapping[str, Key] = {
    "metrics.log_freq": Key(
        lambda value, given: interval(value, _named(given)), "", Fit.EQUIVALENT, "logging.every_steps"
    ),
    **{key: _switch(name) for name, key in _SWITCHES.items()},
    "metrics.save_tb_folder": Key(
        lambda value, given: left("counts in metrics.enable_tensorboard"), "", Fit.IGNORED, "logging.dir"
    ),
    **{
        f"metrics.{name}": without_field(_CONSOLE, lambda value: value in (False, "false"))
        for name in ("disable_color_printing", "enable_color_printing", "rank_0_only", "save_for_all_ranks")
    },
    **dict.fromkeys(
        ("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
        Key(_profiling, "", Fit.APPROXIMATE, "profile.steps, profile.dir, profile.ranks, profile.memory"),
    ),
    **{
        f"profiling.{name}": Key(lambda value, given: left(_PART), "", Fit.IGNORED, _PART)
        for name in (
            *("profile_freq", "profiler_active", "profiler_warmup", "profiler_wait", "save_traces_folder"),
            *("save_memory_snapshot_folder", "experiment_name"),
        )
    },
}
"""What each key says."""


def _metrics(**values: Any) -> Native:
    return {"metrics": values} if values else {}


def _to(cfg: Config, topology: Topology) -> Native:
    return _metrics(**{key.removeprefix("metrics."): True for name, key in _SWITCHES.items() if name in cfg.logging.to})


def _every(cfg: Config, topology: Topology) -> Native:
    return _metrics(log_freq=cfg.logging.every_steps) if cfg.logging.to else {}


def _folder(cfg: Config, topology: Topology) -> Native:
    """The last part of `logging.dir`; what is before it is job.dump_folder, which checkpoints may say."""
    folder = posixpath.basename((cfg.logging.dir or "").rstrip("/"))
    return _metrics(save_tb_folder=folder) if folder and "tensorboard" in cfg.logging.to else {}


def _profiler(cfg: Config, topology: Topology) -> Native:
    first, count = spans(cfg) or (0, 0)
    if not count:
        return {}
    last = first + count - 1
    snapshot = {"enable_memory_snapshot": True} if cfg.profile.memory else {}
    warmup = min(3, first - 1)
    return {
        "profiling": {
            "enable_profiling": True,
            "profile_freq": last,
            "profiler_active": count,
            "profiler_warmup": warmup,
            **snapshot,
        }
    }


def _traces(cfg: Config, topology: Topology) -> Native:
    folder = posixpath.basename((cfg.profile.dir or "").rstrip("/"))
    return {"profiling": {"save_traces_folder": folder}} if cfg.profile.steps and folder else {}


_BELOW = "only its last part: the folder lies below job.dump_folder"
_LOGGED = When("nothing is logged", lambda cfg: not cfg.logging.to, Fit.EXACT, "")

LOGS: Mapping[str, Rule] = {
    "logging.to": to_row(
        "metrics.enable_tensorboard, metrics.enable_wandb",
        "torchtitan",
        _to,
        lost={"mlflow": "torchtitan has no MLflow", "jsonl": "torchtitan writes no such file"},
    ),
    "logging.every_steps": interval_row("metrics.log_freq", _every),
    "logging.dir": row(Fit.EQUIVALENT, "metrics.save_tb_folder", _BELOW, _LOGGED, to=_folder),
    "profile.steps": profiled_row(
        "profiling.enable_profiling, profiling.profile_freq, profiling.profiler_active",
        "torchtitan",
        _profiler,
        "torchtitan traces them again in every cycle",
        Fit.APPROXIMATE,
    ),
    "profile.dir": row(Fit.EQUIVALENT, "profiling.save_traces_folder", _BELOW, NOT_PROFILED, to=_traces),
    "profile.ranks": row(
        Fit.EQUIVALENT,
        "none: all",
        "torchtitan traces all ranks",
        NOT_PROFILED,
        When("all", lambda cfg: cfg.profile.ranks == "all", Fit.EXACT, ""),
    ),
    "profile.memory": row(Fit.EXACT, "profiling.enable_memory_snapshot", "", NOT_PROFILED),
}
"""How each field is said."""
