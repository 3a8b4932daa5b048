"""How long Trainer trains and warms up, where only the dataset knows the number of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unishard.config.nested import Native
from unishard.contract.entries import Unreadable
from unishard.contract.key_rows import number
from unishard.contract.render import FieldResult
from unishard.contract.rules import Fit
from unishard.formats.hf.loop import off
from unishard.formats.names import each
from unishard.formats.reading import ReadDocument

__all__ = ["Lengths", "lengths_of"]


class Lengths(NamedTuple):
    """Arguments that stand for numbers of updates."""

    document: Native
    fields: Mapping[str, FieldResult]
    """By field that they decide."""


_EPOCHS: Mapping[str, tuple[str, float]] = {
    **each("hf llamafactory swift trl", ("num_train_epochs", 3.0)),
    "axolotl": ("num_epochs", 1.0),
}
"""Formats that Trainer reads in the end: their name of the epochs, and how many they assume."""

_ASSUMED = 0.03
"""Part of the updates that axolotl warms up over where its file is silent, at most 100 updates
(core/builders/base.py)."""


def lengths_of(reading: ReadDocument) -> Lengths:
    """What a document for Trainer says instead of numbers of updates, under transformers' names; nothing of any other
    document.
    """
    if reading.format not in _EPOCHS:
        return Lengths({}, {})
    data = reading.source.data
    epochs, assumed = _EPOCHS[reading.format]
    document: Native = {}
    fields: dict[str, FieldResult] = {}
    if "scheduler.total_steps" in reading.undecided:
        document["num_train_epochs"] = data.get(epochs, assumed)
        fields["scheduler.total_steps"] = FieldResult(Fit.EXACT, "num_train_epochs", "")
    elif "scheduler.total_steps" not in reading.decided:
        document |= {"max_steps": data["max_steps"]} if not off(data.get("max_steps")) else {}
        document |= {"num_train_epochs": data[epochs]} if not off(data.get(epochs)) else {}
    if "scheduler.warmup_steps" in reading.undecided:
        document["warmup_steps"], fields["scheduler.warmup_steps"] = _warmup(data)
    return Lengths(document, fields)


def _as_number(value: Any) -> Any:
    """Text such as `1e-5`, as YAML 1.1 reads it, as the number that transformers wants."""
    try:
        return number()(value) if isinstance(value, str) else value
    except Unreadable:
        return value


def _warmup(data: Mapping[str, Any]) -> tuple[Any, FieldResult]:
    """The part of the updates over which the rate climbs: transformers 5 takes a part as `warmup_steps` below 1."""
    part = data.get("warmup_steps") or data.get("warmup_ratio")
    if part:
        return _as_number(part), FieldResult(Fit.EXACT, "warmup_steps", "")
    note = f"axolotl assumes {_ASSUMED:g} of the updates, at most 100; the limit is lost"
    return _ASSUMED, FieldResult(Fit.EQUIVALENT, "warmup_steps", note)
