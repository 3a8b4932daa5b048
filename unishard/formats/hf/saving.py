"""What TrainingArguments say about checkpoints, and how they say it (transformers 5.23, trainer_callback.py and
training_args.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Key, KeyEffect, left_out
from unishard.contract.field_rows import asked, copied, exact, keeps_more, row, when_default
from unishard.contract.key_rows import boolean, integer, number, text
from unishard.contract.rules import SCRIPT, Fit, Rule, approximate, equivalent
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.loop import off

_FOLDER = "trainer_output"
"""Where Trainer writes if it is not set."""
_STEPS = 500
"""Trainer's interval if it is not set."""

_LAST = "Trainer also saves at the end of the training; call engine.save() there"
_EPOCHS = "saves after epochs; call engine.save() there, or set checkpoint.every_steps"
_PART = "a fraction of all steps, which only the data knows; set checkpoint.every_steps"
_BEST = "saves after the best evaluation so far; call engine.save(metric=...) after each, and set checkpoint.keep_best"


def _somewhere(document: DocumentValues) -> Mapping[str, Any]:
    """Trainer's own directory, where the document names none."""
    return {} if document.get("output_dir") else {"checkpoint.dir": _FOLDER}


def _directory(value: Any, document: DocumentValues) -> KeyEffect:
    if not value:
        return left_out("is not set")
    VALUES["output_dir"](value)
    fields = {"checkpoint.dir": text(value)}
    if "save_strategy" in document or "save_steps" in document:
        return KeyEffect(fields=fields)
    return KeyEffect(
        Fit.EQUIVALENT, f"Trainer saves every {_STEPS} updates; {_LAST}", {**fields, "checkpoint.every_steps": _STEPS}
    )


def _strategy(value: Any, document: DocumentValues) -> KeyEffect:
    VALUES["save_strategy"](value)
    match value:
        case "no":
            return KeyEffect(fields={"checkpoint.every_steps": None})
        case "steps" if "save_steps" not in document:
            return KeyEffect(Fit.EQUIVALENT, _LAST, {**_somewhere(document), "checkpoint.every_steps": _STEPS})
        case "steps":
            return KeyEffect(Fit.EXACT, "", {}, copy_verbatim=True)
        case "epoch":
            return KeyEffect(Fit.NEEDS_INPUT, _EPOCHS, copy_verbatim=True)
    return KeyEffect(Fit.NEEDS_INPUT, _BEST, copy_verbatim=True)


def _steps(value: Any, document: DocumentValues) -> KeyEffect:
    VALUES["save_steps"](value)
    strategy = document.get("save_strategy")
    if strategy not in (None, "steps"):
        return left_out(f"is read where save_strategy is steps, and not {strategy}")
    every = number(0)(value)
    if not every:
        return KeyEffect(fields={"checkpoint.every_steps": None})
    if every < 1:
        whole = document.get("max_steps")
        if off(whole) or whole == -1:
            return KeyEffect(Fit.NEEDS_INPUT, _PART, copy_verbatim=True)
        every = math.ceil(integer(1)(whole) * every)
    return KeyEffect(Fit.EQUIVALENT, _LAST, {**_somewhere(document), "checkpoint.every_steps": integer(1)(every)})


def _limit(value: Any, document: DocumentValues) -> KeyEffect:
    """How many checkpoints are kept; 0 and null keep all."""
    if value is None:
        return left_out("is not set")
    count = integer()(value)
    return KeyEffect(fields={"checkpoint.keep_last": count if count > 0 else None})


def _at_signal(value: Any, document: DocumentValues) -> KeyEffect:
    if not boolean(value if value is not None else False):
        return left_out("is off")
    return KeyEffect(Fit.EQUIVALENT, _EXIT, {**_somewhere(document), "checkpoint.on_signal": ["SIGTERM"]})


_EXIT = "Trainer saves and returns from train(); here a save exits with code 85"

SAVED: Mapping[str, Key] = {
    "output_dir": Key(
        _directory, ("checkpoint.dir",), note=f"Trainer saves every {_STEPS} updates where nothing else is said"
    ),
    "save_strategy": Key(_strategy, ("checkpoint.every_steps",), note="your loop does epoch and best"),
    "save_steps": Key(_steps, ("checkpoint.every_steps",), Fit.EQUIVALENT, _LAST),
    "save_total_limit": Key(_limit, ("checkpoint.keep_last",)),
    "enable_jit_checkpoint": Key(_at_signal, ("checkpoint.on_signal",), Fit.EQUIVALENT, _EXIT),
}
"""What each argument says."""


def _interval(cfg: Config, topology: Topology) -> Native:
    steps = cfg.checkpoint.every_steps
    return {"save_strategy": "no"} if steps is None else {"save_strategy": "steps", "save_steps": steps}


def _kept(cfg: Config, topology: Topology) -> Native:
    spared = cfg.checkpoint.keep_last is None or keeps_more(cfg)
    return {} if spared else {"save_total_limit": cfg.checkpoint.keep_last}


_ALL = "Trainer keeps the newest or all: all are kept"
_FLAG = "a TrainerCallback that sets control.should_save"

SAVING: Mapping[str, Rule] = {
    "checkpoint.dir": copied("checkpoint.dir", "output_dir"),
    "checkpoint.every_steps": row(
        Fit.EQUIVALENT,
        "save_strategy, save_steps",
        "Trainer also saves at the end of the training",
        when_default("checkpoint.every_steps"),
        to=_interval,
    ),
    **asked(Fit.NEEDS_INPUT, SCRIPT, {"checkpoint.every_minutes": f"{_FLAG} after so many minutes"}),
    "checkpoint.keep_last": exact(
        "save_total_limit", approximate("with keep_every or keep_best", keeps_more, _ALL), to=_kept
    ),
    "checkpoint.on_signal": row(
        Fit.NEEDS_INPUT,
        f"enable_jit_checkpoint, {SCRIPT}",
        f"other signals than SIGTERM: {_FLAG} and control.should_training_stop",
        when_default("checkpoint.on_signal"),
        equivalent("only SIGTERM", lambda cfg: set(cfg.checkpoint.on_signal) == {"SIGTERM"}, _EXIT),
        to=lambda cfg, topology: {"enable_jit_checkpoint": True} if "SIGTERM" in cfg.checkpoint.on_signal else {},
    ),
}
"""How each field is said."""
