"""Accelerate's config, from which a training is started whose TrainingArguments name no engine: it decides engine and
strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from unishard.config.describe import shown
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect
from unishard.contract.rules import Fit
from unishard.formats import catalog
from unishard.formats.reading import ReadDocument
from unishard.formats.sidecar.following import LAUNCHER
from unishard.formats.sidecar.sidecar import Sidecar
from unishard.formats.source import find_named

_DECIDED = ("backend", "sharding.strategy")
_ABSENT = (
    "it decides the engine and the strategy; add it, run where it is started, or add --set backend=... --set "
    "sharding.strategy=..."
)
_STAYS = "decides the engine and the strategy, and stays the launcher's: what is written is started from it as well"


def engine_is_open(entries: Iterable[Entry]) -> bool:
    """Whether TrainingArguments leave the engine to the launcher, without which they mean plain data parallelism."""
    return any(map(_leaves_engine, entries))


def _leaves_engine(entry: Entry) -> bool:
    return entry.assumed and entry.path[-1] == "fsdp" and entry.value is False


def decided(own: list[Entry], given: Iterable[Entry], beside: Sidecar, ranks: Topology | None) -> list[Entry]:
    """TrainingArguments with the launcher's engine, where there is one.

    Args:
        own: The entries of the document.
        given: Those of what is beside it, which count more than the launcher's config.
        beside: What is beside it.
        ranks: The ranks, where they are known.
    """
    if beside.launcher is None:
        return own
    said = {field for entry in given if not entry.assumed for field in entry.effect.fields}
    origins = beside.launcher.origins
    return [entry for entry in own if not _leaves_engine(entry)] + [
        _without(entry, said)._replace(
            place="default of Accelerate" if entry.assumed else str(origins.of(entry.path)), from_sidecar=True
        )
        for entry in catalog.get("accelerate").entries(beside.launcher, ranks)
    ]


def _without(entry: Entry, said: Collection[str]) -> Entry:
    """The entry without what the launch line or the arguments say otherwise about the processes."""
    fields = {
        field: value
        for field, value in entry.effect.fields.items()
        if field not in said or not field.startswith("launch.")
    }
    return entry._replace(effect=entry.effect._replace(fields=fields))


def deciding(entry: Entry) -> Entry:
    """The entry, refused where it is a launcher's config that is missing: nothing else says how the training is
    sharded.
    """
    if entry.path != (LAUNCHER,):
        return entry
    what = entry.effect.note.partition(": ")[0]
    return entry._replace(effect=KeyEffect(Fit.UNSUPPORTED, f"{what}: {_ABSENT}", decides=_DECIDED))


def staying(beside: Sidecar) -> list[Entry]:
    """The line that says, where TrainingArguments are written again, that the launcher keeps the strategy."""
    if beside.launcher is None:
        return []
    return [
        Entry(
            ("accelerate launch",),
            beside.launcher.name,
            KeyEffect(Fit.IGNORED, _STAYS),
            place=beside.name,
            from_sidecar=True,
        )
    ]


def clashes(reading: ReadDocument, beside: Sidecar) -> Iterator[Entry]:
    """The options of a launch line that say something else than the config of Accelerate that is translated."""
    own = dict(flat(reading.source.data))
    for key, value in flat(beside.launcher.data) if beside.launcher else ():
        place = beside.launcher.origins.of(key)  # type: ignore[union-attr]
        if place.source == beside.name and own.get(key) != value and not _same_file(own.get(key), value, reading):
            note = f"counts more than the file, where {key} is {shown(own.get(key))}; make them equal, or leave one out"
            option = f"accelerate --{key.rpartition('.')[2].replace('_', '-')}"
            yield Entry((option,), value, KeyEffect(Fit.UNSUPPORTED, note), place=str(place), from_sidecar=True)


def _same_file(own: Any, other: Any, reading: ReadDocument) -> bool:
    """Whether two values name one file that is there."""
    if not (isinstance(own, str) and isinstance(other, str)):
        return False
    one, two = (find_named(name, reading.source.folder) for name in (own, other))
    return bool(one and two and one.samefile(two))


_PRECISION = "mixed_precision"


def as_launched(
    reading: ReadDocument, beside: Sidecar, ranks: Topology | None, *, whole: bool, same: bool
) -> tuple[list[Entry], str]:
    """What a document says, and the argument that decides its precision; empty where none does.

    What a launch line says of the ranks, and TrainingArguments of the precision (transformers 5.23, training_args.py),
    counts more than a config of Accelerate.

    Args:
        reading: The document.
        beside: What is beside it.
        ranks: Those that count.
        whole: Whether that is all of the TrainingArguments.
        same: Whether the document is written in its own format again, where the launch line stays beside it.
    """
    if reading.format != "accelerate":
        return list(reading.entries), ""
    switch = _switched(reading.source.data.get(_PRECISION), beside) if whole else ""
    if same or (not switch and ranks == reading.topology):
        return list(reading.entries), switch
    document = {**reading.source.data, **({_PRECISION: switch} if switch else {})}
    entries = catalog.get("accelerate").entries(reading.source._replace(data=document), ranks)
    if not switch:
        return list(entries), ""
    place = beside.place(switch)
    yields = KeyEffect(Fit.IGNORED, f"{place} says {switch}, which counts more")
    moved = (
        entry._replace(path=(switch,), value=True, place=place, from_sidecar=True)
        if entry.path == (_PRECISION,)
        else entry
        for entry in entries
    )
    return [Entry((_PRECISION,), reading.source.data[_PRECISION], yields), *moved], switch


def _switched(said: Any, beside: Sidecar) -> str:
    """The precision that is switched on, where the config says another."""
    switch = next((word for word in ("fp16", "bf16") if beside.values.get(word) is True), "")
    return "" if said is None or str(said).lower() == switch else switch
