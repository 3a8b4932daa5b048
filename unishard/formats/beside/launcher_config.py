"""Accelerate's config, from which a training is started whose TrainingArguments name no engine: it decides engine and
strategy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unishard.config.describe import bare
from unishard.config.nested import flat, merge, nested
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect
from unishard.contract.rules import Fit
from unishard.formats import catalog
from unishard.formats.beside.engine_choice import leaves_engine
from unishard.formats.beside.supplied import Supplied
from unishard.formats.files.source import Source, find_named
from unishard.formats.reading.document import ReadDocument

STAYS = "counts more than the file, and stays in the command"
_ENGINE_STAYS = (
    "decides the engine and the strategy, and stays the launcher's: what is written is started from it as well"
)


def decided(own: list[Entry], added: Sequence[Entry], supplied: Supplied, reading: ReadDocument) -> list[Entry]:
    """TrainingArguments with the launcher's engine, where there is one.

    Args:
        reading: The document.
        own: The entries of the document.
        added: Those of what is beside it, which count more than the launcher's config.
        supplied: What is beside it.
    """
    if supplied.launcher is None:
        return [_replicated(entry, supplied) if leaves_engine(entry) else entry for entry in own]
    own = [_loaded(entry, supplied.launcher) for entry in own]
    told = (field for entry in added if not entry.assumed for field in entry.effect.fields)
    fields = {field for field in told if field.startswith("launch.")}
    fields |= {field for entry in own if _MASTER in _dtype_of(entry) for field in _DTYPES}
    switches = {entry.path[-1]: entry for entry in (*added, *own) if not entry.assumed}
    values = {key: entry.value for key, entry in switches.items()}
    switch = _switched(supplied.launcher.data.get(_PRECISION), values)
    place = (switches[switch].place or reading.source.origins.of(switches[switch].path)) if switch else ""
    return [entry for entry in own if not leaves_engine(entry) and entry.path[-1] != (switch or None)] + [
        _without(entry, fields)._replace(place=_place(entry, supplied.launcher, str(place), switch), supplied=True)
        for entry in _switching(supplied.launcher, supplied.topology, switch, str(place))
    ]


_MASTER = "precision.master"
_DTYPES = (_MASTER, "precision.compute", "precision.reduce", "precision.accumulate")


def _dtype_of(entry: Entry) -> Mapping[str, Any]:
    return entry.effect.fields if entry.path[-1] in ("dtype", "torch_dtype") else {}


def _loaded(entry: Entry, launcher: Source) -> Entry:
    """The dtype in which a model is loaded: DeepSpeed makes fp32 masters of it, and so does Accelerate for FSDP where
    it mixes precisions.
    """
    mixed = str(launcher.data.get(_PRECISION) or "no").lower() != "no"
    if _MASTER not in _dtype_of(entry) or not (mixed or launcher.data.get("distributed_type") == "DEEPSPEED"):
        return entry
    fields = {field: value for field, value in entry.effect.fields.items() if field == "precision.compute"}
    return entry._replace(effect=entry.effect._replace(fields=fields))


def _replicated(entry: Entry, supplied: Supplied) -> Entry:
    """The entry, which stands where a command starts the training that brings no engine either."""
    if not supplied.without_engine:
        return entry
    effect = entry.effect._replace(note=f"DistributedDataParallel: {supplied.without_engine} brings no engine")
    return entry._replace(effect=effect, place=supplied.name, supplied=True)


def _place(entry: Entry, file: Source, place: str, switch: str) -> str:
    if switch and entry.path == (switch,):
        return place
    return "default of Accelerate" if entry.assumed else str(file.origins.of(entry.path))


def _without(entry: Entry, decided_fields: Collection[str]) -> Entry:
    """The entry without what the command or the arguments say otherwise."""
    fields = {field: value for field, value in entry.effect.fields.items() if field not in decided_fields}
    return entry._replace(effect=entry.effect._replace(fields=fields))


def staying(supplied: Supplied) -> list[Entry]:
    """The line that says, where TrainingArguments are written again, that the launcher keeps the strategy."""
    if supplied.launcher is None:
        return []
    return [
        Entry(
            ("accelerate launch",),
            supplied.launcher.name,
            KeyEffect(Fit.IGNORED, _ENGINE_STAYS),
            place=supplied.name,
            supplied=True,
        )
    ]


def staying_options(reading: ReadDocument, supplied: Supplied) -> Iterator[Entry]:
    """The options of a command that say something else than the config of Accelerate, which is written again."""
    for key, value in _options(reading, supplied).items():
        option = f"accelerate --{key.rpartition('.')[2].replace('_', '-')}"
        yield Entry(
            (option,),
            value,
            KeyEffect(Fit.IGNORED, STAYS, notable=True),
            place=str(supplied.launcher.origins.of(key)),  # type: ignore[union-attr]
            supplied=True,
        )


def _options(reading: ReadDocument, supplied: Supplied) -> dict[str, Any]:
    """What the options of a command say otherwise than the config of Accelerate that is translated, which they
    count more than (Accelerate 1.15.0, commands/launch.py).
    """
    own, launcher = dict(flat(reading.source.data)), supplied.launcher
    return {
        key: value
        for key, value in (flat(launcher.data) if launcher else ())
        if launcher.origins.of(key).source == supplied.name  # type: ignore[union-attr]
        and own.get(key) != value
        and not _same_file(own.get(key), value, reading)
    }


def _same_file(own: Any, theirs: Any, reading: ReadDocument) -> bool:
    """Whether two values name one file that is there."""
    if not (isinstance(own, str) and isinstance(theirs, str)):
        return False
    first, second = (find_named(name, reading.source.folder) for name in (own, theirs))
    return bool(first and second and first.samefile(second))


_PRECISION = "mixed_precision"


def as_launched(reading: ReadDocument, supplied: Supplied, *, whole: bool, same: bool) -> tuple[list[Entry], str]:
    """What a document says, and the argument that decides its precision; empty where none does.

    What a command says of the ranks, and TrainingArguments of the precision (transformers 5.23, training_args.py),
    counts more than a config of Accelerate.

    Args:
        reading: The document.
        supplied: What is beside it, with the ranks that count.
        whole: Whether that is all of the TrainingArguments.
        same: Whether the document is written in its own format again, where the command stays beside it.
    """
    if reading.format != "accelerate":
        return list(reading.entries), ""
    switch = _switched(reading.source.data.get(_PRECISION), supplied.values) if whole else ""
    options = {} if same else _options(reading, supplied)
    if same or not (switch or options or supplied.topology != reading.topology):
        return list(reading.entries), switch
    file = reading.source._replace(data=merge(dict(reading.source.data), nested(options)))
    places = {key: str(supplied.launcher.origins.of(key)) for key in options} if supplied.launcher else {}
    own = dict(flat(reading.source.data))
    yielding = [
        Entry(tuple(key.split(".")), own[key], _yields(places[key], value))
        for key, value in options.items()
        if own.get(key) is not None
    ]
    told = (
        entry._replace(place=places[entry.key], supplied=True) if entry.key in places else entry
        for entry in _switching(file, supplied.topology, switch, supplied.place(switch))
    )
    return [*yielding, *told], switch


def _yields(place: str, value: Any) -> KeyEffect:
    return KeyEffect(Fit.IGNORED, f"{place} says {bare(value)}, which counts more")


def _switching(file: Source, ranks: Topology | None, switch: str, place: str) -> list[Entry]:
    """What a config of Accelerate says where TrainingArguments switch the precision, which they hand to the Accelerator
    (transformers 5.24, training_args.py).

    Args:
        file: The config.
        ranks: Those that count.
        switch: The argument that is on; empty where the config counts.
        place: Where that argument stands.
    """
    accelerate = catalog.get("accelerate")
    if not switch:
        return list(accelerate.entries(file, ranks))
    entries = accelerate.entries(file._replace(data={**file.data, _PRECISION: switch}), ranks)
    moved = (
        entry._replace(path=(switch,), value=True, place=place, supplied=True) if entry.path == (_PRECISION,) else entry
        for entry in entries
    )
    return [Entry((_PRECISION,), file.data[_PRECISION], _yields(place, switch)), *moved]


def _switched(choice: Any, values: Mapping[str, Any]) -> str:
    """The precision that is switched on, where the config says another."""
    switch = next((word for word in ("fp16", "bf16") if values.get(word) is True), "")
    return "" if choice is None or str(choice).lower() == switch else switch
