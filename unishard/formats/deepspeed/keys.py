"""What DeepSpeed's monitors and prints say about `logging` (0.19.8, monitor/ and runtime/engine.py); the engine's own
table has the rest.

Only for a file that a script passes to DeepSpeed: a tool around it, such as transformers' Trainer, logs by its own
keys.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from typing import Any

from unishard.contract.entries import Entry, Given, Key, Meaning, Unreadable
from unishard.contract.express import AUTO
from unishard.contract.rules import Fit
from unishard.contract.templates import placeholders_in
from unishard.formats.log_tables import destinations, interval, left, without_field

__all__ = ["KEYS", "MONITORS", "with_logs"]

MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv_monitor": "jsonl"}
"""DeepSpeed's monitors, and their destination here."""
_JOB = "DeepSpeedJobName"
_PROJECT = "deepspeed"
_CSV = "JSON lines here, a file with commas for each value there"
_PRINTS = "DeepSpeed prints steps, rates and speed"
_BREAKDOWN = "affects only logs; a trace shows what a step consists of"
_FLOPS = "affects only logs"


def _section(given: Given, name: str) -> Mapping[str, Any]:
    """A monitor's section, if it is on."""
    value = given.get(name)
    return value if isinstance(value, Mapping) and value.get("enabled") in (True, "true", "True") else {}


def _named(given: Given) -> list[str]:
    return [name for name in MONITORS if _section(given, name)]


def _monitor(name: str) -> Key:
    """A monitor; the first that is on says all of them."""

    def read(value: Any, given: Given) -> Meaning:
        named = _named(given)
        if name not in named:
            return left("is off")
        said = destinations(
            [MONITORS[one] for one in named], _folder(given), note=_CSV if name == "csv_monitor" else ""
        )
        texts = _texts(value) if name == "wandb" else {}
        return said._replace(fields={**said.fields, **texts} if named[0] == name else texts)

    return Key(
        read,
        "",
        Fit.EQUIVALENT,
        f"logging.to: {MONITORS[name]}{', and its project, team and group' if name == 'wandb' else ', logging.dir'}",
    )


def _texts(value: Mapping[str, Any]) -> dict[str, Any]:
    said = {
        "logging.project": value.get("project", _PROJECT),
        "logging.wandb_entity": value.get("team"),
        "logging.wandb_group": value.get("group"),
    }
    return {
        field: text
        for field, text in said.items()
        if isinstance(text, str) and text.strip() and not placeholders_in(text)
    }


def _folder(given: Given) -> str:
    """Of the first monitor that writes files."""
    for name in ("tensorboard", "csv_monitor"):
        if found := _section(given, name):
            return posixpath.join(str(found.get("output_path") or ""), str(found.get("job_name", _JOB)))
    return ""


def _prints(value: Any, given: Given) -> Meaning:
    if value in (None, AUTO, 0, math.inf) or isinstance(value, bool):  # Accelerate silences DeepSpeed with inf
        return left("is off")
    return interval(value, _named(given), note=_PRINTS)


def _off(value: Any) -> bool:
    return not value or (isinstance(value, Mapping) and not value.get("enabled"))


KEYS: Mapping[str, Key] = {
    "steps_per_print": Key(_prints, "", Fit.EQUIVALENT, "logging.every_steps, and logging.to progress"),
    **{name: _monitor(name) for name in MONITORS},
    "comet": without_field("logs to Comet are not supported; log to another destination", _off),
    "wall_clock_breakdown": without_field(_BREAKDOWN, _off),
    "flops_profiler": without_field(_FLOPS, _off),
}
"""What each key says."""


def with_logs(entries: list[Entry], document: Mapping[str, Any]) -> list[Entry]:
    """The entries of the engine's own table, with what the keys about logs say in the config's words."""
    given = Given(document, {}, None)
    return [_logged(entry, given) for entry in entries]


def _logged(entry: Entry, given: Given) -> Entry:
    key = KEYS.get(entry.key)
    if key is None or entry.assumed or entry.meaning.fit is not Fit.IGNORED or placeholders_in(entry.value):
        return entry
    try:
        meaning = key.read(entry.value, given)
    except Unreadable:  # a word that a script replaces, or what the engine's own table has refused
        return entry
    return entry._replace(meaning=meaning._replace(kept=entry.meaning.kept))
