"""What llm-foundry's keys say about checkpoints, and how they say it (Composer 0.32, utils/misc.py; llm-foundry
0.22).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning, Undecided
from unishard.contract.field_rows import keeps_more, write
from unishard.contract.key_rows import integer, number, text
from unishard.contract.rules import Fit, Rule, When
from unishard.formats.composer.durations import updates
from unishard.formats.fallbacks import exact, row, when_default

__all__ = ["SAVED", "SAVING"]

_STEPS = 1000
"""llm-foundry's interval if it is not set."""
_LAST = "Composer also saves at the end of the training; call engine.save() there"
_NOWHERE = "nothing is saved without save_folder"


def _folder(value: Any, given: Given) -> Meaning:
    if not value:
        return Meaning(Fit.IGNORED, "is not set", kept=True)
    named = text(value).replace("{run_name}", str(given.get("run_name") or "{run_name}"))
    implied = {} if "save_interval" in given else {"checkpoint.every_steps": _STEPS}
    if "://" in named or "{" in named:
        why = "is no directory of a file system" if "://" in named else "has names in it that Composer fills in"
        who = Undecided(f"save_folder, which {why}: {value}")
        return Meaning(Fit.NEEDS_INPUT, f"the value comes from {who.who}", {"checkpoint.dir": who, **implied})
    fields = {"checkpoint.dir": named, **implied}
    return (
        Meaning(Fit.EQUIVALENT, f"llm-foundry saves every {_STEPS} updates; {_LAST}", fields)
        if implied
        else Meaning(fields=fields)
    )


def _interval(value: Any, given: Given) -> Meaning:
    if not given.get("save_folder"):
        return Meaning(Fit.IGNORED, _NOWHERE, kept=True)
    if isinstance(value, str) and value.strip().endswith("sec"):
        minutes = number(0)(value.strip().removesuffix("sec")) / 60
        return Meaning(Fit.EQUIVALENT, _LAST, {"checkpoint.every_minutes": minutes or None})
    steps = updates(value, given)
    if isinstance(steps, Undecided):
        return Meaning(
            Fit.NEEDS_INPUT,
            f"comes from {steps.who}; call engine.save() there, or set checkpoint.every_steps",
            kept=True,
        )
    return Meaning(Fit.EQUIVALENT if steps else Fit.EXACT, _LAST, {"checkpoint.every_steps": steps or None})


def _kept(value: Any, given: Given) -> Meaning:
    count = integer(-1)(value)
    if not count:
        return Meaning(
            Fit.NEEDS_INPUT,
            "keeps none where they are uploaded; upload in your script, set checkpoint.keep_last",
            kept=True,
        )
    return Meaning(fields={"checkpoint.keep_last": None if count < 0 else count})


SAVED: Mapping[str, Key] = {
    "save_folder": Key(
        _folder, "checkpoint.dir", note=f"llm-foundry saves every {_STEPS} updates where save_interval is not said"
    ),
    "save_interval": Key(_interval, "checkpoint.every_steps", Fit.EQUIVALENT, _LAST),
    "save_num_checkpoints_to_keep": Key(_kept, "checkpoint.keep_last", note="-1 keeps all"),
}
"""What each key says."""


def _place(cfg: Config, topology: Topology) -> Native:
    return {} if cfg.checkpoint.dir is None else {"save_folder": cfg.checkpoint.dir}


def _time(cfg: Config, topology: Topology) -> Native:
    """Composer has one interval, and that in updates counts. With 0 it never saves, where it would at its default."""
    if cfg.checkpoint.dir is None:
        return {}
    if cfg.checkpoint.every_steps is not None or cfg.checkpoint.every_minutes is None:
        return {"save_interval": f"{cfg.checkpoint.every_steps or 0}ba"}
    return {"save_interval": f"{max(round(cfg.checkpoint.every_minutes * 60), 1)}sec"}


def _count(cfg: Config, topology: Topology) -> Native:
    all_ = cfg.checkpoint.keep_last is None or keeps_more(cfg)
    return (
        {"save_num_checkpoints_to_keep": -1 if all_ else cfg.checkpoint.keep_last}
        if cfg.checkpoint.dir or not all_
        else {}
    )


_ALL = "Composer keeps the newest or all: all are kept"
_ALSO = "Composer also saves at the end of the training"

SAVING: Mapping[str, Rule] = {
    "checkpoint.dir": exact("save_folder", to=_place),
    "checkpoint.every_steps": row(
        Fit.EQUIVALENT, "save_interval", _ALSO, when_default("checkpoint.every_steps"), to=_time
    ),
    "checkpoint.every_minutes": row(
        Fit.EQUIVALENT,
        "save_interval",
        _ALSO,
        when_default("checkpoint.every_minutes"),
        When(
            "with every_steps",
            lambda cfg: cfg.checkpoint.every_steps is not None,
            Fit.APPROXIMATE,
            "Composer has one interval: every_steps counts",
        ),
        to=_time,
    ),
    "checkpoint.keep_last": row(
        Fit.EXACT,
        "save_num_checkpoints_to_keep",
        "-1 keeps all",
        When("with keep_every or keep_best", keeps_more, Fit.APPROXIMATE, _ALL),
        to=_count,
    ),
    "checkpoint.on_signal": write(
        "a handler (signal.signal) that sets a flag, and a callback that saves and stops",
        lambda cfg: not cfg.checkpoint.on_signal,
        "empty",
    ),
}
"""How each field is said."""
