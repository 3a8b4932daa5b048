"""What TrainingArguments say about logs, and how they say it (transformers 5.23, training_args.py and integrations)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning, Unreadable
from unishard.contract.rules import Fit, Rule
from unishard.contract.templates import placeholders_in
from unishard.formats.hf.loop import off
from unishard.formats.hf.saving import FOLDER
from unishard.formats.log_tables import (
    ONLY_LOGS,
    destinations,
    interval,
    interval_row,
    left,
    text_key,
    text_rows,
    to_row,
)

__all__ = ["LOGGED", "LOGS"]

_STEPS = 500
"""Trainer's interval if it is not set."""
_SAME = ("tensorboard", "wandb", "mlflow")
"""What Trainer and unishard both write to, under the same word."""
_PART = f"{ONLY_LOGS}; a fraction of all steps, which only the data knows: set logging.every_steps"


def _reported(given: Given) -> tuple[list[str], list[str]]:
    """The integrations that `report_to` names: those that unishard has, and the others."""
    said = given.get("report_to")
    words = said if isinstance(said, list) else [] if off(said) else [said]
    known = [word for word in _SAME if word in words]
    return known, [str(word) for word in words if word not in known and not off(word)]


def _by_steps(given: Given) -> bool:
    return given.get("logging_strategy") in (None, "steps")


def _steps(value: Any, given: Given) -> Meaning:
    if value == 0 and given.get("logging_strategy") not in ("no", "epoch"):
        raise Unreadable('must be above 0 with logging_strategy: steps, got 0; or write logging_strategy: "no"')
    if not _by_steps(given) or placeholders_in(value):
        return left()
    if isinstance(value, int | float) and 0 < value < 1:
        return left(_PART)
    return interval(value, _reported(given)[0])


def _report(value: Any, given: Given) -> Meaning:
    known, others = _reported(given)
    folder = given.get("logging_dir") or f"{given.get('output_dir') or FOLDER}/runs"
    said = destinations(known if _by_steps(given) else [], str(folder), others=others)
    if not said.fields or "logging_steps" in given:
        return said
    return said._replace(fields={**said.fields, "logging.every_steps": _STEPS})


def _named(given: Given) -> bool:
    return bool({"wandb", "mlflow"} & {*_reported(given)[0]}) and _by_steps(given)


LOGGED: Mapping[str, Key] = {
    "logging_steps": Key(
        _steps, "", Fit.EQUIVALENT, "logging.every_steps, and logging.to progress where report_to names nothing"
    ),
    "report_to": Key(
        _report, "", Fit.EQUIVALENT, "logging.to: tensorboard, wandb, mlflow; logging.dir beside output_dir"
    ),
    "run_name": text_key("logging.run_name", _named, "logging.run_name, for wandb and mlflow"),
}
"""What each argument says."""


def _interval(cfg: Config, topology: Topology) -> Native:
    return {"logging_strategy": "steps", "logging_steps": cfg.logging.every_steps} if cfg.logging.to else {}


def _destinations(cfg: Config, topology: Topology) -> Native:
    named = [name for name in cfg.logging.to if name in _SAME]
    return {"report_to": named} if named else {}


LOGS: Mapping[str, Rule] = {
    "logging.to": to_row(
        "report_to", "Trainer", _destinations, lost={"jsonl": "Trainer writes trainer_state.json instead"}
    ),
    "logging.every_steps": interval_row("logging_strategy, logging_steps", _interval),
    **text_rows({"run_name": {"wandb": "run_name", "mlflow": "run_name"}}),
}
"""How each field is said."""
