"""How formats read their keys about logs and profiles into `logging` and `profile`, and how they write these: one way
for all tools.

A format says which destinations a document switches on; from that follow the rows of the keys that belong to a
destination.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from unishard.config import Config
from unishard.config.nested import Native, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Given, Key, Meaning
from unishard.contract.key_rows import integer
from unishard.contract.rules import Fit, Rule, Setting, When, unless
from unishard.contract.templates import placeholders_in
from unishard.formats.fallbacks import row

__all__ = [
    "NOT_LOGGED",
    "NOT_PROFILED",
    "ONLY_LOGS",
    "consecutive",
    "destinations",
    "interval",
    "interval_row",
    "left",
    "profiled_row",
    "spans",
    "text_key",
    "text_rows",
    "to_row",
    "without_field",
]

ONLY_LOGS = "affects only logs"
_NAMES = "the same values under other names"
_FILES = {"jsonl", "tensorboard", "mlflow"}
"""Destinations that write into `logging.dir`."""

Named = Callable[[Given], Sequence[str]]
"""The destinations of a document, in the words of `logging.to`."""


def left(note: str = ONLY_LOGS) -> Meaning:
    """A key that nothing here says; it is kept in its own format."""
    return Meaning(Fit.IGNORED, note, kept=True)


def destinations(
    named: Sequence[str], folder: str, *, progress: bool = True, note: str = "", others: Collection[str] = ()
) -> Meaning:
    """What a key says that switches destinations on.

    Args:
        named: The destinations.
        folder: For the files of those that write some.
        progress: Whether the tool shows its progress as well.
        note: What is different.
        others: Destinations of the tool that unishard does not have.
    """
    lost = f"nothing is written to {', '.join(others)}" if others else ""
    if not named:
        return left("; ".join(filter(None, (ONLY_LOGS, lost))))
    fields: dict[str, Any] = {"logging.to": [*(["progress"] if progress else []), *named]}
    if _FILES & {*named}:
        fields["logging.dir"] = "runs" if placeholders_in(folder) else folder
    return Meaning(Fit.EQUIVALENT, "; ".join(filter(None, (note or _NAMES, lost))), fields, kept=True)


def interval(value: Any, named: Sequence[str], *, note: str = _NAMES, progress: bool = True) -> Meaning:
    """What a key says that counts the steps between two records; without a destination it asks for progress."""
    if not named and not progress:
        return left()
    where = {} if named else {"logging.to": ["progress"]}
    return Meaning(Fit.EQUIVALENT, note, {**where, "logging.every_steps": integer(1)(value)})


def text_key(field: str, used: Callable[[Given], bool], note: str = "") -> Key:
    """A key with a text that one field holds, such as the name of a run.

    Args:
        field: Dotted.
        used: Whether a destination of the document reads it.
        note: For the docs, instead of the field.
    """

    def read(value: Any, given: Given) -> Meaning:
        if not used(given) or not isinstance(value, str) or not value.strip() or placeholders_in(value):
            return left()
        return Meaning(fields={field: value})

    return Key(read, "", note=note or field)


def without_field(note: str, off: Callable[[Any], bool]) -> Key:
    """A key without an equal, and why."""
    return Key(lambda value, given: left("is off") if off(value) else left(note), "", Fit.IGNORED, note)


NOT_LOGGED = unless("nothing is logged", lambda cfg: not cfg.logging.to)
NOT_PROFILED = unless("no steps", lambda cfg: not cfg.profile.steps)


def to_row(key: str, tool: str, to: Setting, *, lost: Mapping[str, str]) -> Rule:
    """The row of `logging.to`.

    Args:
        key: The tool's keys.
        tool: Its name.
        to: Writes them.
        lost: Destinations that the tool does not have, and what it has instead.
    """
    cases = [When(name, _writes(name), Fit.IGNORED, f"{ONLY_LOGS}; {instead}") for name, instead in lost.items()]
    note = f"the same values under {tool}'s names; its progress is on the terminal"
    return row(Fit.EQUIVALENT, key, note, NOT_LOGGED, *cases, to=to)


def _writes(name: str) -> Callable[[Config], bool]:
    return lambda cfg: name in cfg.logging.to


def interval_row(key: str, to: Setting, note: str = "the loss is a mean since the last") -> Rule:
    """The row of `logging.every_steps`."""
    return row(Fit.EQUIVALENT, key, note, NOT_LOGGED, to=to)


def text_rows(keys: Mapping[str, Mapping[str, str]]) -> dict[str, Rule]:
    """The rows of fields that are written as they are: by field of `logging`, the dotted key for each destination that
    reads it.
    """
    return {f"logging.{field}": _text_row(field, names) for field, names in keys.items()}


def _text_row(field: str, names: Mapping[str, str]) -> Rule:
    def to(cfg: Config, topology: Topology) -> Native:
        value = getattr(cfg.logging, field)
        return {} if value is None else nested({key: value for name, key in names.items() if name in cfg.logging.to})

    return row(Fit.EXACT, ", ".join(dict.fromkeys(names.values())), "", NOT_LOGGED, to=to)


def profiled_row(key: str, tool: str, to: Setting, note: str, fit: Fit = Fit.EQUIVALENT) -> Rule:
    """The row of `profile.steps` of a tool that profiles consecutive steps.

    Args:
        key: The tool's keys.
        tool: Its name.
        to: Writes them.
        note: How it differs.
        fit: How well it says them.
    """
    gaps = When(
        "steps with gaps", lambda cfg: spans(cfg) is None, Fit.IGNORED, f"traces only; {tool} has consecutive steps"
    )
    return row(fit, key, note, NOT_PROFILED, gaps, to=to)


def spans(cfg: Config) -> tuple[int, int] | None:
    """The first of the profiled steps and their number, if they are consecutive."""
    steps = cfg.profile.steps
    return (steps[0], len(steps)) if steps and list(steps) == consecutive(steps[0], len(steps)) else None


def consecutive(first: int, count: int) -> list[int]:
    """So many steps from the first on."""
    return list(range(first, first + count))
