"""What axolotl's keys say about checkpoints (axolotl 0.18.0, core/builders/base.py,
`_configure_save_and_eval_strategy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.field_rows import exact, keeps_more, left_to_script, when_default
from unishard.contract.key_rows import number, text
from unishard.contract.rules import Fit, Rule, When
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.loop import off
from unishard.formats.hf.saving import EPOCHS, limit, stepped

__all__ = ["FOLDER", "SAVED", "SAVING"]

FOLDER = "./model-out"
"""Where axolotl writes if it is not set (schemas/config.py)."""
_KEPT = 4
"""How many checkpoints it keeps if it is not set."""
_MANY = 1_000_000
"""Stands for all of them: 0 and null stand for four."""


def _beside(given: DocumentValues) -> Mapping[str, Any]:
    """What axolotl assumes about the checkpoints that it writes."""
    folder = {} if given.get("output_dir") else {"checkpoint.dir": FOLDER}
    return folder if given.get("save_total_limit") else {**folder, "checkpoint.keep_last": _KEPT}


def _directory(value: Any, given: DocumentValues) -> KeyEffect:
    if not value:
        return left_out("is not set")
    return KeyEffect(fields={"checkpoint.dir": text(value)})


def _steps(value: Any, given: DocumentValues) -> KeyEffect:
    if off(value):
        return left_out("is not set")
    return stepped(value, given, _beside(given))


def _strategy(value: Any, given: DocumentValues) -> KeyEffect:
    if not off(given.get("save_steps")):
        return left_out("save_steps counts")
    if value is None:
        return left_out("is not set")
    if value is False or value == "no":  # YAML reads a bare no as false, and axolotl's schema takes it
        return KeyEffect(fields={"checkpoint.every_steps": None})
    VALUES["save_strategy"](value)
    if value == "steps":
        return stepped(500, given, _beside(given))
    if value == "best":
        return KeyEffect(
            Fit.NEEDS_INPUT,
            "saves where an evaluation was the best so far; call engine.save(metric=...) there, and set "
            "checkpoint.keep_best",
            copy_verbatim=True,
        )
    return KeyEffect(Fit.NEEDS_INPUT, EPOCHS, copy_verbatim=True)


def _times(value: Any, given: DocumentValues) -> KeyEffect:
    """`saves_per_epoch`."""
    if off(value):
        return left_out("is not set")
    number(0)(value)
    return KeyEffect(
        Fit.NEEDS_INPUT,
        "counts in epochs, of which only the data knows; set checkpoint.every_steps",
        copy_verbatim=True,
    )


def _limit(value: Any, given: DocumentValues) -> KeyEffect:
    found = limit(value, given)
    count = found.fields.get("checkpoint.keep_last", _KEPT)
    return KeyEffect(fields={"checkpoint.keep_last": None if count == _MANY else count or _KEPT})


SAVED: Mapping[str, Key] = {
    "output_dir": Key(_directory, "checkpoint.dir"),
    "save_steps": Key(
        _steps, "checkpoint.every_steps", Fit.EQUIVALENT, "axolotl also saves at the end of the training"
    ),
    "save_strategy": Key(_strategy, "checkpoint.every_steps", note="your loop does epoch and best"),
    "saves_per_epoch": Key(_times, "", Fit.NEEDS_INPUT, "counts in epochs"),
    "save_total_limit": Key(
        _limit, "checkpoint.keep_last", note=f"axolotl keeps {_KEPT} where it saves and this is not said"
    ),
}
"""What each key says."""


def _kept(cfg: Config, topology: Topology) -> Native:
    """All are kept by a number that no training reaches; nothing needs to be said where nothing is saved by itself."""
    count = None if keeps_more(cfg) else cfg.checkpoint.keep_last
    return {} if count is None and cfg.checkpoint.every_steps is None else {"save_total_limit": count or _MANY}


SAVING: Mapping[str, Rule] = {
    "checkpoint.keep_last": exact(
        "save_total_limit",
        when_default("checkpoint.keep_last", "all: written as a number that no training reaches"),
        When("with keep_every or keep_best", keeps_more, Fit.APPROXIMATE, "all are kept"),
        to=_kept,
    ),
    "checkpoint.every_minutes": left_to_script(
        "an axolotl plugin whose TrainerCallback sets control.should_save",
        lambda cfg: cfg.checkpoint.every_minutes is None,
        "null",
    ),
    "checkpoint.on_signal": left_to_script(
        "an axolotl plugin whose TrainerCallback sets should_save and should_training_stop",
        lambda cfg: not cfg.checkpoint.on_signal,
        "empty",
    ),
}
"""How a field is said, where TrainingArguments say it otherwise."""
