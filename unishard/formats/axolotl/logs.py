"""What axolotl's keys say about logs, and how they say it (axolotl 0.18.0, utils/schemas/integrations.py, wandb_.py, mlflow_.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.axolotl.saving import FOLDER
from unishard.formats.fallbacks import row
from unishard.formats.hf.loop import off
from unishard.mapping.entries import Given, Key, Meaning
from unishard.mapping.key_rows import integer
from unishard.mapping.rules import Fit, Rule, When, unless
from unishard.mapping.templates import placeholders_in

__all__ = ["LOGGED", "LOGS"]

_ONLY = "affects only logs"
_NAMES = "the same values under unishard's names"
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
            return Meaning(Fit.IGNORED, _ONLY, kept=True)
        fields: dict[str, Any] = {"logging.to": ["progress", *named]}
        if {"tensorboard", "mlflow"} & {*named}:
            folder = f"{given.get('output_dir') or FOLDER}/runs"
            fields["logging.dir"] = "runs" if placeholders_in(folder) else folder
        return Meaning(Fit.EQUIVALENT, _NAMES, fields, kept=True)

    return Key(read, "", Fit.EQUIVALENT, f"logging.to: {name}")


def _project(name: str, switch: str, field: str, fields: Mapping[str, str]) -> Key:
    """A key that also switches its destination on where no other key says whether it is."""

    def read(value: Any, given: Given) -> Meaning:
        said = _text(name, field, fields)(value, given)
        return said if switch in given else _joined(said, _switch(name).read(value, given))

    return Key(read, "", Fit.EQUIVALENT, "logging.project, and logging.to")


def _joined(one: Meaning, other: Meaning) -> Meaning:
    return other._replace(fields={**one.fields, **other.fields}) if other.fields else one


def _text(name: str, key: str, fields: Mapping[str, str]) -> Any:
    """Reads a text that unishard has one field for, which W&B's key decides if both are there."""

    def read(value: Any, given: Given) -> Meaning:
        named = _destinations(given)
        field = fields[key]
        both = name == "mlflow" and "wandb" in named and field in _WANDB.values()
        if name not in named or both or not isinstance(value, str) or not value.strip() or placeholders_in(value):
            return Meaning(Fit.IGNORED, _ONLY, kept=True)
        return Meaning(Fit.EXACT, "", {field: value}, kept=True)

    return read


def _mode(value: Any, given: Given) -> Meaning:
    if "wandb" not in _destinations(given) or value not in ("online", "offline"):
        return Meaning(Fit.IGNORED, _ONLY, kept=True)
    return Meaning(Fit.EXACT, "", {"logging.wandb_mode": value}, kept=True)


def _steps(value: Any, given: Given) -> Meaning:
    if off(value) or placeholders_in(value):
        return Meaning(Fit.IGNORED, _ONLY, kept=True)
    where = {} if _destinations(given) else {"logging.to": ["progress"]}
    return Meaning(Fit.EQUIVALENT, _NAMES, {**where, "logging.every_steps": integer(1)(value)})


LOGGED: Mapping[str, Key] = {
    "logging_steps": Key(_steps, "", Fit.EQUIVALENT, "logging.every_steps"),
    **{f"use_{name}": _switch(name) for name in ("tensorboard", "wandb", "mlflow")},
    **{key: Key(_text("wandb", key, _WANDB), "", note=field) for key, field in _WANDB.items()},
    **{key: Key(_text("mlflow", key, _MLFLOW), "", note=field) for key, field in _MLFLOW.items()},
    "wandb_project": _project("wandb", "use_wandb", "wandb_project", _WANDB),
    "mlflow_experiment_name": _project("mlflow", "use_mlflow", "mlflow_experiment_name", _MLFLOW),
    "wandb_mode": Key(_mode, "", note="logging.wandb_mode"),
}
"""What each key says."""


def _to(cfg: Config, topology: Topology) -> Native:
    return {f"use_{name}": True for name in ("tensorboard", "wandb", "mlflow") if name in cfg.logging.to}


def _every(cfg: Config, topology: Topology) -> Native:
    return {"logging_steps": cfg.logging.every_steps} if cfg.logging.to else {}


def _said(field: str, **keys: str) -> Any:
    """Writes a field under the key of each destination that reads it."""

    def to(cfg: Config, topology: Topology) -> Native:
        value = getattr(cfg.logging, field)
        return {} if value is None else {key: value for name, key in keys.items() if name in cfg.logging.to}

    return to


_OFF = unless("nothing is logged", lambda cfg: not cfg.logging.to)

LOGS: Mapping[str, Rule] = {
    "logging.to": row(
        Fit.EQUIVALENT,
        "use_tensorboard, use_wandb, use_mlflow",
        "the same values under axolotl's names; its progress is on the terminal",
        _OFF,
        When("jsonl", lambda cfg: "jsonl" in cfg.logging.to, Fit.IGNORED, f"{_ONLY}; axolotl writes trainer_state.json instead"),
        to=_to,
    ),
    "logging.every_steps": row(Fit.EQUIVALENT, "logging_steps", "the loss is a mean since the last", _OFF, to=_every),
    "logging.project": row(
        Fit.EXACT,
        "wandb_project, mlflow_experiment_name",
        "",
        _OFF,
        to=_said("project", wandb="wandb_project", mlflow="mlflow_experiment_name"),
    ),
    "logging.run_name": row(
        Fit.EXACT, "wandb_name, mlflow_run_name", "", _OFF, to=_said("run_name", wandb="wandb_name", mlflow="mlflow_run_name")
    ),
    "logging.wandb_entity": row(Fit.EXACT, "wandb_entity", "", _OFF, to=_said("wandb_entity", wandb="wandb_entity")),
    "logging.wandb_mode": row(Fit.EXACT, "wandb_mode", "", _OFF, to=_said("wandb_mode", wandb="wandb_mode")),
    "logging.mlflow_uri": row(Fit.EXACT, "mlflow_tracking_uri", "", _OFF, to=_said("mlflow_uri", mlflow="mlflow_tracking_uri")),
}
"""How each field is said."""
