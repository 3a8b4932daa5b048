"""What TrainingArguments say about logs, and how they say it (transformers 5.23, training_args.py and integrations)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.fallbacks import row
from unishard.formats.hf.loop import off
from unishard.formats.hf.saving import FOLDER
from unishard.mapping.entries import Given, Key, Meaning, Unreadable
from unishard.mapping.key_rows import integer
from unishard.mapping.rules import Fit, Rule, When, unless
from unishard.mapping.templates import placeholders_in

__all__ = ["LOGGED", "LOGS"]

_STEPS = 500
"""Trainer's interval if nobody says."""
_SAME = ("tensorboard", "wandb", "mlflow")
"""What Trainer and unishard both write to, under the same word."""
_ONLY = "affects only logs"
_NAMES = "the same values under unishard's names"
_PART = "affects only logs; a fraction of all steps, which only the data knows: set logging.every_steps"


def _reported(given: Given) -> tuple[list[str], list[str]]:
    """The integrations that `report_to` names: those that unishard has, and the others."""
    said = given.get("report_to")
    words = said if isinstance(said, list) else [] if off(said) else [said]
    known = [word for word in _SAME if word in words]
    return known, [str(word) for word in words if word not in known and not off(word)]


def _steps(value: Any, given: Given) -> Meaning:
    strategy = given.get("logging_strategy")
    if value == 0 and strategy not in ("no", "epoch"):
        raise Unreadable('must be above 0 with logging_strategy: steps, got 0; or write logging_strategy: "no"')
    if strategy not in (None, "steps") or placeholders_in(value):
        return Meaning(Fit.IGNORED, _ONLY, kept=True)
    if isinstance(value, int | float) and 0 < value < 1:
        return Meaning(Fit.IGNORED, _PART, kept=True)
    where = {} if _reported(given)[0] else {"logging.to": ["progress"]}
    return Meaning(Fit.EQUIVALENT, _NAMES, {**where, "logging.every_steps": integer(1)(value)})


def _report(value: Any, given: Given) -> Meaning:
    known, others = _reported(given)
    if not known or given.get("logging_strategy") not in (None, "steps"):
        left = f"; unishard does not write to {', '.join(others)}" if others else ""
        return Meaning(Fit.IGNORED, f"{_ONLY}{left}", kept=True)
    fields: dict[str, Any] = {"logging.to": ["progress", *known]}
    if {"tensorboard", "mlflow"} & {*known}:
        folder = given.get("logging_dir") or f"{given.get('output_dir') or FOLDER}/runs"
        fields["logging.dir"] = "runs" if placeholders_in(folder) else str(folder)
    if "logging_steps" not in given:
        fields["logging.every_steps"] = _STEPS
    left = f"; unishard does not write to {', '.join(others)}" if others else ""
    return Meaning(Fit.EQUIVALENT, f"{_NAMES}{left}", fields, kept=True)


def _name(value: Any, given: Given) -> Meaning:
    used = {"wandb", "mlflow"} & {*_reported(given)[0]} and given.get("logging_strategy") in (None, "steps")
    if not used or not isinstance(value, str) or not value.strip() or placeholders_in(value):
        return Meaning(Fit.IGNORED, _ONLY, kept=True)
    return Meaning(fields={"logging.run_name": value})


LOGGED: Mapping[str, Key] = {
    "logging_steps": Key(_steps, "", Fit.EQUIVALENT, "logging.every_steps, and logging.to progress where report_to names nothing"),
    "report_to": Key(_report, "", Fit.EQUIVALENT, "logging.to: tensorboard, wandb, mlflow; logging.dir beside output_dir"),
    "run_name": Key(_name, "", Fit.EXACT, "logging.run_name, for wandb and mlflow"),
}
"""What each argument says."""


def _interval(cfg: Config, topology: Topology) -> Native:
    return {"logging_strategy": "steps", "logging_steps": cfg.logging.every_steps} if cfg.logging.to else {}


def _destinations(cfg: Config, topology: Topology) -> Native:
    named = [name for name in cfg.logging.to if name in _SAME]
    return {"report_to": named} if named else {}


def _run_name(cfg: Config, topology: Topology) -> Native:
    return {} if cfg.logging.run_name is None else {"run_name": cfg.logging.run_name}


_OFF = unless("nothing is logged", lambda cfg: not cfg.logging.to)

LOGS: Mapping[str, Rule] = {
    "logging.to": row(
        Fit.EQUIVALENT,
        "report_to",
        "the same values under Trainer's names; its progress is on the terminal",
        _OFF,
        When("jsonl", lambda cfg: "jsonl" in cfg.logging.to, Fit.IGNORED, "affects only logs; Trainer writes trainer_state.json instead"),
        to=_destinations,
    ),
    "logging.every_steps": row(Fit.EQUIVALENT, "logging_strategy, logging_steps", "the loss is a mean since the last", _OFF, to=_interval),
    "logging.run_name": row(Fit.EXACT, "run_name", "", _OFF, to=_run_name),
}
"""How each field is said."""
