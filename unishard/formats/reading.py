"""From what a document says, entry by entry, to a config: contradictions found, undecided fields named, nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from unishard.config import Config, leaves
from unishard.errors import ConfigError, Problem
from unishard.formats.source import Source
from unishard.loading.document import Document
from unishard.loading.findings import dotted, findings_of
from unishard.loading.origins import OVERRIDE, Origins
from unishard.loading.overrides import override
from unishard.meanings import Entry, Undecided, Verdict
from unishard.rules import merge, nested
from unishard.topology import Topology
from unishard.wording import shown

__all__ = ["Reading", "assemble", "default_of", "placeholder", "undecided_in"]

_STAND_INS: Mapping[str, Any] = {"scheduler.total_steps": 2**40, "scheduler.warmup_steps": 2}
"""What fills the place of an undecided field that others need; every other one keeps its default."""
_LEFT_OUT: Any = object()
_FIELDS = dict(leaves(Config))
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+(?:\.[a-z_]+)*)\}")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a document says, in the config's words."""

    format: str
    source: Source
    entries: tuple[Entry, ...]
    config: Config
    """Fields in `undecided` hold a value that only fills their place."""
    decided: frozenset[str]
    """Fields of the config that the document, its tool's defaults or an override decides."""
    undecided: Mapping[str, Undecided]
    """Fields that only the training script knows, and who decides each."""
    topology: Topology | None
    """The ranks that the document speaks of."""


def placeholder(field: str) -> str:
    """What stands in a unishard file for a value that needs a decision: `${training.micro_batch_size}`."""
    return f"${{{field}}}"


def undecided_in(value: Any) -> str | None:
    """The field that a placeholder names; None for anything else."""
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    return found.group(1) if found else None


def assemble(
    name: str,
    source: Source,
    entries: Sequence[Entry],
    *,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
) -> Reading:
    """Put a config together from what the entries say.

    An entry that contradicts an earlier one, or that the schema refuses, is refused in the reading, with the reason; the others stand.
    An assumed entry yields to what is written.

    Args:
        name: Of the format.
        source: The document.
        entries: In the order of the document.
        overrides: Changes on top, such as `training.micro_batch_size=4`; they also decide what was undecided.
        topology: The ranks that the document speaks of.

    Raises:
        ConfigError: An override cannot be used.
    """
    found = _without_contradictions(entries)
    while True:
        fields = {field: value for entry in found for field, value in entry.meaning.fields.items()}
        document = _document(fields, found)
        changed = _override(document, overrides)
        try:
            config = Config.model_validate(document.data)
        except ValidationError as error:
            found = _refuse(found, error, document)
            continue
        undecided = {field: value for field, value in fields.items() if isinstance(value, Undecided) and field not in changed}
        return Reading(name, source, tuple(found), config, frozenset(fields) | changed, undecided, topology)


def _without_contradictions(entries: Sequence[Entry]) -> list[Entry]:
    said: dict[str, Entry] = {}
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.assumed):
        clashes = [field for field, value in entry.meaning.fields.items() if field in said and said[field].meaning.fields[field] != value]
        if not clashes:
            said.update({field: said.get(field, entry) for field in entry.meaning.fields})
            found.append(entry)
        elif not entry.assumed:
            other = said[clashes[0]]
            found.append(entry.but(Verdict.REFUSED, f"contradicts {other.key}, which is {shown(other.value)}; keep one of the two"))
    return found


def _document(fields: Mapping[str, Any], entries: Sequence[Entry]) -> Document:
    """The fields as a nested document, as a file would hold it; what is assumed and the schema assumes as well is left out."""
    assumed = {field for entry in entries if entry.assumed for field in entry.meaning.fields}
    values = {field: _STAND_INS.get(field, _LEFT_OUT) if isinstance(value, Undecided) else value for field, value in fields.items()}
    data = nested(
        {
            field: value
            for field, value in values.items()
            if value is not _LEFT_OUT and not (field in assumed and value == default_of(field, values))
        }
    )
    for entry in entries:
        for key, value in entry.meaning.native.items():
            data = merge(data, {"native": nested({key: value})})
    return Document(data, Origins(OVERRIDE))


def default_of(field: str, values: Mapping[str, Any]) -> Any:
    """The schema's default of a field, which may depend on the fields beside it."""
    section, _, _ = field.rpartition(".")
    beside = {path.rpartition(".")[2]: value for path, value in values.items() if path.rpartition(".")[0] == section}
    return _FIELDS[field].get_default(call_default_factory=True, validated_data=beside)


def _override(document: Document, overrides: Iterable[str]) -> frozenset[str]:
    """Write the overrides into the document; the fields that they decide."""
    problems = [
        Problem(dotted(finding.path), finding.what, str(finding.place or OVERRIDE))
        for text in overrides
        for finding in override(document, text)
    ]
    if problems:
        raise ConfigError(problems)
    return frozenset(text.partition("=")[0].strip() for text in overrides)


def _refuse(entries: Sequence[Entry], error: ValidationError, document: Document) -> list[Entry]:
    """The entries, those refused that the schema finds fault with.

    Raises:
        ConfigError: None of them is at fault, so an override is.
    """
    faults = {dotted(finding.path): finding.what for finding in findings_of(error, document.data)}
    # A field that is missing has no entry of its own: those of its section ask for it then.
    for at_fault in (_within, _beside):
        refused = [_faulty(entry, faults, at_fault) for entry in entries]
        if any(new is not old for new, old in zip(refused, entries, strict=True)):
            return refused
    raise ConfigError([Problem(path, what, "override") for path, what in faults.items()])


def _faulty(entry: Entry, faults: Mapping[str, str], at_fault: Callable[[str, str], bool]) -> Entry:
    fields = [f"native.{key}" for key in entry.meaning.native] + list(entry.meaning.fields)
    fault = next((f"{path}: {what}" for path, what in faults.items() for field in fields if at_fault(path, field)), None)
    return entry.but(Verdict.REFUSED, f"cannot be had together with the rest: {fault}") if fault else entry


def _beside(path: str, field: str) -> bool:
    return path.rpartition(".")[0] == field.rpartition(".")[0]


def _within(path: str, field: str) -> bool:
    """Whether a fault at a path lies in a field, or the other way round."""
    return path == field or path.startswith((f"{field}.", f"{field}[")) or field.startswith(f"{path}.")
