"""From what a document says, entry by entry, to a config: contradictions found, undecided fields named, nothing
lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from unishard.config import Config, leaves
from unishard.config.describe import shown
from unishard.config.loading.document import Document
from unishard.config.loading.origins import OVERRIDE, Origins
from unishard.config.loading.overrides import override
from unishard.config.loading.placeholders import STAND_INS, stand_ins
from unishard.config.loading.renamed import current_change
from unishard.config.loading.validation import dotted, findings_of
from unishard.config.nested import is_within, merge, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Undecided
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem, in_parts
from unishard.formats.files.source import Source
from unishard.formats.reading.undecided import without_unused

_LEFT_OUT: Any = object()
_BACKEND = "backend="
_FIELDS = dict(leaves(Config))
_CLASS = ("type", "class_path", "_target_")
"""Keys that name a class, whose arguments stand beside them."""
_BY_ENGINE = ("sharding", "offload", "precision", "activation_checkpointing", "communication", "native", "ranks")
"""Sections of which an engine does what the schema's default says where a file is silent; the others are the training
script's."""
_BY_OPTIMIZER = ("optimizer", "scheduler")
"""Sections of which whoever builds the optimizer decides all."""
_SECTIONS = {path.partition(".")[0] for path in _FIELDS}


class ReadDocument(NamedTuple):
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
    fills_auto: bool = False
    """Whether its tool fills in the `"auto"` of a DeepSpeed config."""

    @property
    def unsaid(self) -> frozenset[str]:
        """Fields for which the document holds no key: they are undecided, or follow from what is unknown."""
        named = {field for entry in self.entries if not entry.assumed for field in entry.effect.fields}
        return frozenset(_FIELDS) - self.decided | (self.undecided.keys() - named)

    def decides(self, field: str) -> bool:
        """Whether the tool of the document decides a field, if only by what its engine does where a file is silent."""
        if field in self.undecided:
            return False
        section = field.partition(".")[0]
        if field in self.decided or section in _BY_ENGINE:
            return True
        refused = (name for entry in self.entries for name in entry.effect.decides)
        open_ = any(name.partition(".")[0] in _BY_OPTIMIZER for name in (*self.undecided, *refused))
        return section in _BY_OPTIMIZER and "optimizer.name" in self.decided and not open_

    def deciding(self, fields: Iterable[str]) -> ReadDocument:
        """The same, for a tool that has defaults of its own for these fields: they count as decided wherever the tool
        of the document decides them.
        """
        return self._replace(decided=self.decided.union(filter(self.decides, fields)))


def assemble(
    name: str,
    source: Source,
    entries: Sequence[Entry],
    *,
    overrides: Iterable[str] = (),
    topology: Topology | None = None,
    fills_auto: bool = False,
) -> ReadDocument:
    """Put a config together from what the entries say.

    An entry that contradicts an earlier one, or that the schema refuses, is refused in the reading, with the reason;
    the others stand. An assumed entry yields to what is written.

    Args:
        name: Of the format.
        source: The document.
        entries: In the order of the document.
        overrides: Changes on top, such as `training.micro_batch_size=4`; they also decide what was undecided.
        topology: The ranks that the document speaks of.
        fills_auto: Whether its tool fills in the `"auto"` of a DeepSpeed config.

    Raises:
        ConfigError: An override cannot be used.
    """
    overrides = tuple(map(current_change, overrides))
    resolved = _without_contradictions(_lifted(_on_another_engine(entries, overrides), overrides), _paths(overrides))
    unneeded: frozenset[str] = frozenset()
    while True:
        fields = _fields(resolved)
        document = _document(fields, resolved, unneeded)
        changed = _override(document, overrides)
        try:
            config = Config.parse(document.data)
        except ValidationError as error:
            faults = {dotted(finding.path): finding.what for finding in findings_of(error, document.data)}
            pointless = (
                frozenset(field for field in STAND_INS if isinstance(fields.get(field), Undecided) and field in faults)
                - unneeded
            )
            unneeded |= pointless
            if not pointless:
                told = {field for entry in resolved if entry.supplied for field in entry.effect.fields}
                resolved = without_unused(resolved, fields, faults, changed | told) or _refuse(resolved, faults)
            continue
        undecided = {
            field: value
            for field, value in fields.items()
            if isinstance(value, Undecided) and not _overridden(field, changed)
        }
        decided = frozenset(fields) | {field for field in _FIELDS if _overridden(field, changed)}
        return ReadDocument(name, source, tuple(resolved), config, decided, undecided, topology, fills_auto)


def _on_another_engine(entries: Sequence[Entry], overrides: Iterable[str]) -> Sequence[Entry]:
    """The entries, with fields in the place of settings that the engine does not have which an override chooses."""
    chosen = [text.removeprefix(_BACKEND) for text in overrides if text.startswith(_BACKEND)]
    overridden = {
        name: value
        for entry in entries
        if chosen and not any(key.startswith(f"{chosen[-1]}.") for key in entry.effect.native)
        for name, value in entry.effect.if_other_engine.items()
    }
    return [_instead(entry, overridden) for entry in entries] if overridden else entries


def _instead(entry: Entry, overridden: Mapping[str, Any]) -> Entry:
    fields = {name: overridden.get(name, value) for name, value in entry.effect.fields.items()}
    if not entry.effect.if_other_engine:
        return entry._replace(effect=entry.effect._replace(fields=fields))
    return entry._replace(effect=entry.effect._replace(fit=Fit.EQUIVALENT, fields={**fields, **overridden}, native={}))


def _lifted(entries: Sequence[Entry], overrides: Sequence[str]) -> list[Entry]:
    """The entries, where a refused one whose field an override decides leaves it to the override.

    If it names a class, the arguments that mean something for this class only go with it.
    """
    lifted = [_left_to_override(entry, overrides) for entry in entries]
    classes = {
        new.path[:-1] for new, old in zip(lifted, entries, strict=True) if new is not old and new.path[-1] in _CLASS
    }
    return [
        _without_class(entry) if any(entry.path[: len(path)] == path for path in classes if path) else entry
        for entry in lifted
    ]


def _left_to_override(entry: Entry, overrides: Sequence[str]) -> Entry:
    """The fields beside the first follow its section's defaults; one in another section must be overridden as well."""
    decides = [field for field in entry.effect.decides if field in _FIELDS or field in _SECTIONS]
    if entry.effect.fit is not Fit.UNSUPPORTED or not decides:
        return entry
    section = decides[0].partition(".")[0]
    needed = [decides[0], *(field for field in decides[1:] if field.partition(".")[0] != section)]
    if not all(_overridden(field, _paths(overrides)) for field in needed):
        return entry
    decider = " ".join(
        f"--set {text}" for text in overrides if any(_overridden(field, _paths([text])) for field in needed)
    )
    fields = {field: Undecided("--set") for field in needed if field in _FIELDS}
    return entry._replace(effect=KeyEffect(Fit.IGNORED, f"{decider} decides instead", fields))


def _without_class(entry: Entry) -> Entry:
    effect = entry.effect
    own = effect.fit is Fit.IGNORED and effect.copy_verbatim and not (effect.fields or effect.native)
    return entry._replace(effect=effect._replace(copy_verbatim=False)) if own else entry


def _paths(overrides: Iterable[str]) -> frozenset[str]:
    return frozenset(text.partition("=")[0].strip() for text in overrides)


def _without_contradictions(entries: Sequence[Entry], changed: Collection[str] = ()) -> list[Entry]:
    """Those that are written in their order, then those that are assumed, which yield; what is undecided goes with any
    decision.

    So does what an override decides.
    """
    first_sayings: dict[str, tuple[Entry, Any]] = {}
    consistent: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.assumed):
        sayings = entry.effect.sayings
        clashes = [name for name, value in sayings.items() if name in first_sayings and first_sayings[name][1] != value]
        if entry.assumed and clashes:
            fields = {field: value for field, value in entry.effect.fields.items() if field not in clashes}
            if not fields:
                continue
            entry = entry._replace(effect=entry.effect._replace(fields=fields, native={}))
        elif clashes := [
            name
            for name in clashes
            if not _overridden(name, changed) and not _undecided(first_sayings[name][1], sayings[name])
        ]:
            earlier = first_sayings[clashes[0]][0]
            consistent.append(
                entry.but(
                    Fit.UNSUPPORTED, f"contradicts {earlier.key}, which is {shown(earlier.value)}; keep one of the two"
                )
            )
            continue
        consistent.append(entry)
        for name, value in sayings.items():
            if name not in first_sayings or isinstance(first_sayings[name][1], Undecided):
                first_sayings[name] = entry, value
    return consistent


def _undecided(*values: Any) -> bool:
    return any(isinstance(value, Undecided) for value in values)


def _fields(entries: Iterable[Entry]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for entry in entries:
        for field, value in entry.effect.fields.items():
            if isinstance(fields.get(field, _LEFT_OUT), Undecided) or field not in fields:
                fields[field] = value
    return fields


def _overridden(field: str, changed: Collection[str]) -> bool:
    """Whether an override names the field, or the section around it."""
    return is_within(field, changed) or any(path.startswith(f"{field}.") for path in changed)


def _document(fields: Mapping[str, Any], entries: Sequence[Entry], unneeded: Collection[str]) -> Document:
    """The fields as a nested document, as a file would hold it; what is assumed and the schema assumes as well is left
    out.

    So are undecided fields, but for those that have a stand-in and are not unneeded, which is to say that the others do
    without them.
    """
    assumed = {field for entry in entries if entry.assumed for field in entry.effect.fields}
    known = {field: value for field, value in fields.items() if not isinstance(value, Undecided)}
    said = {field: value for field, value in known.items() if field not in assumed or value != default_of(field, known)}
    temporary = stand_ins(said, fields.keys() - known.keys() - set(unneeded))
    values = {field: known.get(field, temporary.get(field, _LEFT_OUT)) for field in fields}
    data = nested(
        {
            field: value
            for field, value in values.items()
            if value is not _LEFT_OUT and not (field in assumed and value == default_of(field, values))
        }
    )
    for entry in entries:
        for key, value in entry.effect.native.items():
            data = merge(data, {"native": nested({key: value})})
    return Document(data, Origins(OVERRIDE))


def default_of(field: str, values: Mapping[str, Any]) -> Any:
    """The schema's default of a field, which may depend on the fields beside it."""
    section, _, _ = field.rpartition(".")
    beside = {
        path.rpartition(".")[2]: info.get_default() if (value := values.get(path, _LEFT_OUT)) is _LEFT_OUT else value
        for path, info in _FIELDS.items()
        if path.rpartition(".")[0] == section
    }
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
    return _paths(overrides)


def _refuse(entries: Sequence[Entry], faults: Mapping[str, str]) -> list[Entry]:
    """The entries, those refused that the schema finds fault with.

    Assumed ones yield instead: no one asked for what a tool assumes.

    Raises:
        ConfigError: None of them is at fault, so an override is.
    """
    blamed = _blamed(entries, faults) or _blamed(
        entries, {path.rpartition(".")[0]: f"{path} {what}" for path, what in faults.items()}
    )
    if not blamed:
        raise ConfigError([Problem(path, what, "override") for path, what in faults.items()])
    yielding = {index for index in blamed if entries[index].assumed}
    if yielding and len(yielding) == len(blamed) and not any(entry.effect.fit is Fit.UNSUPPORTED for entry in entries):
        return [_yielded(entry, blamed[index]) if index in blamed else entry for index, entry in enumerate(entries)]
    if yielding:
        return [entry for index, entry in enumerate(entries) if index not in yielding]
    return [
        entry.but(Fit.UNSUPPORTED, _worded(*blamed[index])) if index in blamed else entry
        for index, entry in enumerate(entries)
    ]


def _yielded(entry: Entry, fault: tuple[str, str]) -> Entry:
    note = f"the tool's default {_worded(*fault)}; left out"
    return entry._replace(effect=entry.effect._replace(fit=Fit.APPROXIMATE, note=note, fields={}, native={}))


def _worded(path: str, what: str) -> str:
    problem, instead = in_parts(what)
    where = f"{path} " if problem.startswith("must be ") else f"conflicts with other settings: {path and f'{path}: '}"
    return f"{where}{problem}; {instead or 'write another value'}"


def _blamed(entries: Sequence[Entry], faults: Mapping[str, str]) -> dict[int, tuple[str, str]]:
    """The entries, by position, that say something at these paths, and the fault of each."""
    blamed = {}
    for index, entry in enumerate(entries):
        paths = entry.effect.sayings
        fault = next((fault for fault in faults.items() if any(_within(fault[0], name) for name in paths)), None)
        if fault:
            blamed[index] = fault
    return blamed


def _within(path: str, field: str) -> bool:
    """Whether a fault at a path lies in a field, or the other way round."""
    return path == field or path.startswith((f"{field}.", f"{field}[")) or (path != "" and field.startswith(f"{path}."))
