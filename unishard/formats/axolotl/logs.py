"""What axolotl's keys say about logs, and how they say it (axolotl 0.18.0, utils/schemas/integrations.py, wandb_.py,
mlflow_.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit, Rule
from unishard.contract.templates import placeholders_in
from unishard.formats.axolotl.saving import FOLDER
from unishard.formats.hf.loop import off
from unishard.formats.log_tables import (
    consecutive,
    destinations,
    interval,
    interval_row,
    left,
    profiled_row,
    spans,
    text_key,
    text_rows,
    to_row,
)

__all__ = ["LOGGED", "LOGS"]

_WANDB = {"wandb_name": "logging.run_name", "wandb_project": "logging.project", "wandb_entity": "logging.wandb_entity"}
_MLFLOW = {
    "mlflow_run_name": "logging.run_name",
    "mlflow_experiment_name": "logging.project",
    "mlflow_tracking_uri": "logging.mlflow_uri",
}


def _destinations(given: Given) -> list[str]:
    """Where axolotl writes: a project switches W&B on, an experiment MLflow."""
    wandb = given.get("use_wandb") if "use_wandb" in given else given.get("wandb_project")
    mlflow = given.get("use_mlflow") if "use_mlflow" in given else given.get("mlflow_experiment_name")
    if str(given.get("wandb_mode")).lower() == "disabled":
        wandb = None
    found = {"tensorboard": given.get("use_tensorboard"), "wandb": wandb, "mlflow": mlflow}
    return [name for name, said in found.items() if not off(said) and not placeholders_in(said)]


def _switch(name: str) -> Key:
    """A key that switches a destination on; the first that is on says all of them."""

    def read(value: Any, given: Given) -> Meaning:
        named = _destinations(given)
        if not named or named[0] != name:
            return left()
        return destinations(named, f"{given.get('output_dir') or FOLDER}/runs")

    return Key(read, "", Fit.EQUIVALENT, f"logging.to: {name}")


def _text(name: str, field: str) -> Key:
    """A text that unishard has one field for, which W&B's key decides if both are there."""

    def used(given: Given) -> bool:
        named = _destinations(given)
        return name in named and not (name == "mlflow" and "wandb" in named and field in _WANDB.values())

    return text_key(field, used)


def _project(name: str, switch: str, key: Key) -> Key:
    """A key that also switches its destination on where no other key says whether it is."""

    def read(value: Any, given: Given) -> Meaning:
        said, on = key.read(value, given), _switch(name).read(value, given)
        return said if switch in given or not on.fields else on._replace(fields={**said.fields, **on.fields})

    return Key(read, "", Fit.EQUIVALENT, "logging.project, and logging.to")


def _mode(value: Any, given: Given) -> Meaning:
    if "wandb" not in _destinations(given) or value not in ("online", "offline"):
        return left()
    return Meaning(fields={"logging.wandb_mode": value}, kept=True)


def _steps(value: Any, given: Given) -> Meaning:
    return left() if off(value) or placeholders_in(value) else interval(value, _destinations(given))


_SNAPSHOT = "axolotl also writes a snapshot of the CUDA allocator: profile.memory"


def _profiled(value: Any, given: Given) -> Meaning:
    """`profiler_steps`, which begin after `profiler_steps_start`."""
    if off(value):
        return left("is off")
    first = integer(0)(given.get("profiler_steps_start") or 0) + 1
    folder = given.get("output_dir") or FOLDER
    folder = "profile" if placeholders_in(folder) else str(folder)
    fields = {
        "profile.steps": consecutive(first, int(integer(1)(value))),
        "profile.dir": folder,
        "profile.memory": True,
    }
    return Meaning(Fit.EQUIVALENT, _SNAPSHOT, fields, kept=True)


LOGGED: Mapping[str, Key] = {
    "logging_steps": Key(_steps, "", Fit.EQUIVALENT, "logging.every_steps"),
    **{f"use_{name}": _switch(name) for name in ("tensorboard", "wandb", "mlflow")},
    **{key: _text("wandb", field) for key, field in _WANDB.items()},
    **{key: _text("mlflow", field) for key, field in _MLFLOW.items()},
    "wandb_project": _project("wandb", "use_wandb", _text("wandb", "logging.project")),
    "mlflow_experiment_name": _project("mlflow", "use_mlflow", _text("mlflow", "logging.project")),
    "wandb_mode": Key(_mode, "", note="logging.wandb_mode"),
    "profiler_steps": Key(_profiled, "", Fit.EQUIVALENT, "profile.steps, profile.memory; profile.dir is output_dir"),
    "profiler_steps_start": Key(
        lambda value, given: left("counts in profiler_steps"), "", Fit.IGNORED, "counts in profiler_steps"
    ),
}
"""What each key says."""


def _to(cfg: Config, topology: Topology) -> Native:
    return {f"use_{name}": True for name in ("tensorboard", "wandb", "mlflow") if name in cfg.logging.to}


def _every(cfg: Config, topology: Topology) -> Native:
    return {"logging_steps": cfg.logging.every_steps} if cfg.logging.to else {}


def _profiler(cfg: Config, topology: Topology) -> Native:
    first, count = spans(cfg) or (0, 0)
    return {"profiler_steps": count, "profiler_steps_start": first - 1} if count else {}


LOGS: Mapping[str, Rule] = {
    "logging.to": to_row(
        "use_tensorboard, use_wandb, use_mlflow",
        "axolotl",
        _to,
        lost={"jsonl": "axolotl writes trainer_state.json instead"},
    ),
    "logging.every_steps": interval_row("logging_steps", _every),
    **text_rows(
        {
            "project": {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name"},
            "run_name": {"wandb": "wandb_name", "mlflow": "mlflow_run_name"},
            "wandb_entity": {"wandb": "wandb_entity"},
            "wandb_mode": {"wandb": "wandb_mode"},
            "mlflow_uri": {"mlflow": "mlflow_tracking_uri"},
        }
    ),
    "profile.steps": profiled_row(
        "profiler_steps, profiler_steps_start", "axolotl", _profiler, f"in output_dir; {_SNAPSHOT}"
    ),
}
"""How each field is said."""
