"""Arguments that one document for Trainer keeps as another has them, whether or not a field of the config says them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config import value_at
from unishard.contract.entries import Entry, Undecided, Unreadable
from unishard.contract.key_rows import number
from unishard.contract.render import FieldResult, RenderedDocument
from unishard.contract.rules import Fit
from unishard.formats.hf.accepted_values import VALUES
from unishard.formats.hf.dialects import section_in
from unishard.formats.hf.keys import ENGINES, KEYS, OLDER, RENAMED
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.readback import same

_ARGUMENTS = frozenset(KEYS).difference(ENGINES, OLDER)
"""Those that transformers has today."""
_TRAINERS = ("hf", "llamafactory", "trl")
"""Formats that Trainer reads in the end."""
_EPOCHS = 3.0
"""How many it trains where a file does not say it."""
_LAUNCHERS = ("debug", "use_cpu")
"""Keys of Accelerate's config too, which may be read beside a document."""
_BY_FSDP = "activation_checkpointing"
"""Said in `fsdp_config` where FSDP is on."""


def with_arguments(rendered: RenderedDocument, reading: ReadDocument, to: str) -> RenderedDocument:
    """A document under transformers' names, with the source's arguments that hold as they stand.

    Args:
        rendered: The document so far.
        reading: The source.
        to: The format.
    """
    document, words = dict(rendered.document), dict(rendered.fields)
    for name, entry in _arguments(reading):
        value = _as_number(entry.value) if entry.effect.fields else entry.value
        refused = entry.effect.rejected_upstream and value is entry.value and name == entry.path[-1]
        if name not in _ARGUMENTS or refused or not _accepted(name, value):
            continue
        if _holds(name, entry, reading, document):
            words[entry.as_it_is] = FieldResult.held(name)
            if not isinstance(rendered.document.get(name), int | float):
                document[name] = value
    if reading.format in _TRAINERS:
        _add_length(document, words, reading, to)
        words |= {entry.as_it_is: FieldResult.held(entry.key) for entry in _repeated(reading, document, words)}
    return RenderedDocument(document, words)


def _repeated(reading: ReadDocument, document: Mapping[str, Any], words: Mapping[str, FieldResult]) -> Iterator[Entry]:
    """The defaults that the document says word for word: with Trainer they mean the same, though not elsewhere."""
    for entry in reading.entries:
        differs = any(words[field].fit is not Fit.EXACT for field in entry.effect.fields if field in words)
        if differs and entry.assumed and (entry.key, entry.value) in document.items():
            yield entry


def _arguments(reading: ReadDocument) -> Iterator[tuple[str, Entry]]:
    """Each argument that is written, by transformers' name, those under an older name last."""
    section = section_in(reading.source.data)
    pairs = [
        (RENAMED.get(entry.path[-1], entry.path[-1]), entry)
        for entry in reading.entries
        if not entry.assumed
        and entry.path[-1] not in (_LAUNCHERS if entry.supplied else ())
        and (entry.supplied or (reading.format in _TRAINERS and entry.path[:-1] == ((section,) if section else ())))
    ]
    yield from sorted(pairs, key=lambda pair: pair[1].path[-1] in RENAMED)


def _holds(name: str, entry: Entry, reading: ReadDocument, document: Mapping[str, Any]) -> bool:
    """Whether an argument still says what is to be said; overrides, and DeepSpeed's own config, may say otherwise."""
    effect = entry.effect
    if effect.unknown or entry.value is None:
        return False
    if effect.fit is Fit.UNSUPPORTED:
        sections = {field.partition(".")[0] for field in effect.decides}
        return effect.copy_verbatim and not any(f"{section}.name" in reading.decided for section in sections)
    if not effect.fields:
        return bool(document.get(name, entry.value) == entry.value)
    unchanged = all(_unchanged(field, value, reading) for field, value in effect.fields.items())
    return unchanged and (name in document or name != _BY_FSDP)


def _accepted(name: str, value: Any) -> bool:
    try:
        VALUES.get(name, bool)(value)
    except Unreadable:
        return False
    return True


def _unchanged(field: str, value: Any, reading: ReadDocument) -> bool:
    if isinstance(value, Undecided):
        return field in reading.undecided
    return same(value_at(reading.config, field), value)


def _add_length(document: dict[str, Any], words: dict[str, FieldResult], reading: ReadDocument, to: str) -> None:
    """How long the training and its warm-up are, where the source says so only by what Trainer assumes."""
    if "scheduler.total_steps" in reading.undecided:
        if reading.format != to and not document.keys() & {"max_steps", "num_train_epochs"}:
            document["num_train_epochs"] = _EPOCHS
        words["scheduler.total_steps"] = FieldResult.held("num_train_epochs")
    if "scheduler.warmup_steps" in reading.undecided and "warmup_steps" in document:
        words["scheduler.warmup_steps"] = FieldResult.held("warmup_steps")


def _as_number(value: Any) -> Any:
    """Text such as `1e-5`, as YAML 1.1 reads it, as the number that transformers wants."""
    try:
        return number()(value) if isinstance(value, str) else value
    except Unreadable:
        return value
