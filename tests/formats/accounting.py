"""Whether every key of a document ends in exactly one line of the report. Used by the property tests and by the check
of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from unishard.config.nested import flat, is_within, merge, nested
from unishard.contract.rules import Fit
from unishard.formats import NAMES, Outcome, ReadDocument, catalog
from unishard.formats.files.source import Source
from unishard.formats.report.comparing import compare

Path = tuple[str, ...]
FORMATS = [name for name in NAMES if find_spec(f"unishard.formats.{name}")]
WRITTEN = [name for name in catalog.writable() if name in FORMATS]


_ABSENT = object()


def leaves_of(data: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    """The path of every value; a list is one value, and so is a mapping that holds nothing."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, (*above, name))
        else:
            yield (*above, name)


def value_at(data: Any, path: Path) -> Any:
    """What stands at a path; None where nothing does."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def faults_of(outcome: Outcome) -> list[str]:
    """What is wrong with a report: keys in no line or in two, lines for no key, fits without a reason."""
    faults = []
    written = [entry for entry in outcome.reading.entries if not entry.assumed]
    said = [entry.path for entry in written]
    named = {entry.path for entry in written if entry.value != value_at(outcome.reading.source.data, entry.path)}
    leaves = list(leaves_of(outcome.reading.source.data))
    for leaf in leaves:
        # A mapping whose key is a name, as in `optimizer: {adamw: {lr: 1}}`, has a line for the name beside those of
        # what it holds.
        covering = [path for path in said if path == leaf[: len(path)]]
        covering = [path for path in covering if path not in named or path == leaf or len(covering) == 1]
        below = [path for path in said if path[: len(leaf)] == leaf]
        if len(covering) != 1 and not (not covering and below):
            faults.append(f"{'.'.join(leaf)} is in {len(covering)} lines of the report")
    for path in said:
        if not any(leaf[: len(path)] == path or path[: len(leaf)] == leaf for leaf in leaves):
            faults.append(f"{'.'.join(path)} is in the report and not in the document")
    lines = [item for item in outcome.items if not item.key.startswith("--set ")]
    if len(lines) != len(outcome.reading.entries):
        faults.append(f"{len(outcome.reading.entries)} entries became {len(lines)} lines")
    for item in outcome.items:
        if item.fit is not Fit.EXACT and not item.note:
            faults.append(f"{item.key} is {item.fit} without a reason")
        if item.fit is Fit.UNSUPPORTED and ";" not in item.note:
            faults.append(f"{item.key} is refused without saying what instead: {item.note}")
    return faults


def unlike_itself(outcome: Outcome) -> list[str]:
    """The keys of a file in its own format again that are not as they were, though its tool takes them as they stand."""
    source = outcome.reading.source.data
    refused = {entry.path for entry in outcome.reading.entries if not (entry.assumed or entry.goes_through)}
    moved = {key for item in outcome.items if item.entry.path in refused for key in item.keys}
    before, after = dict(flat(source)), dict(flat(outcome.document))
    return [
        key
        for key in before.keys() | after.keys()
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        and not is_within(key, {*moved, *(".".join(path) for path in refused)})
    ]


def spelled_out(reading: ReadDocument) -> Source:
    """The document with all that its tool assumes written into it, but for what follows from other keys."""
    engines = {"backend", "deepspeed"}  # entries that stand for the document, or a block of it
    assumed = [entry for entry in reading.entries if entry.assumed and not entry.place and entry.key not in engines]
    sizes = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    data: Mapping[str, Any] = reading.source.data
    for entry in assumed:
        if entry.value is not None and entry.path[-1] not in sizes:
            data = merge(data, nested({entry.key: entry.value}))
    return reading.source._replace(data=data)


def changed_fits(silent: Outcome, spelled: Outcome) -> list[str]:
    """The keys that a tool assumes which have another fit where a file says them, but for what a script must do then."""
    there = {item.key: item for item in spelled.items if item.entry.goes_through and not item.by_script}
    in_place = catalog.get(silent.reading.format).stays_in_place(silent.reading.source)
    if not in_place or compare(silent.reading, spelled.reading):
        return []  # the file has no place for them, or together they are not what its tool assumes
    return [
        f"{item.key} is {item.fit} where the file is silent, and {there[item.key].fit} where it says so"
        for item in silent.items
        if item.assumed and item.key in there and there[item.key].fit is not item.fit
    ]
