"""What became of one key of a document in a document of another format, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from unishard.config.loading.placeholders import placeholder
from unishard.config.nested import Native, flat, merge, nested
from unishard.contract.entries import Entry, Path
from unishard.contract.render import KEPT_AUTO, LEFT_OUT, FieldResult, Rendered
from unishard.contract.rules import NO_KEY, Fit, worst
from unishard.formats.format import Format
from unishard.formats.names import each
from unishard.formats.reading import ReadDocument
from unishard.formats.same_engine import left_to_engine, stays_with_engine

_FULL = "state_dict_type"
_GATHERS = "stage3_gather_16bit_weights_on_model_save"
_OF_ZERO = (
    "zero3_save_16bit_model",
    _GATHERS,
    _GATHERS.removeprefix("stage3_"),
    "stage3_gather_fp16_weights_on_model_save",
)
"""Names of DeepSpeed's switch: Accelerate's, its own, and the older one, which DeepSpeed 0.19.8 still reads
(runtime/zero/config.py)."""
_FSDP = {
    "accelerate": "fsdp_config.fsdp_{}",
    **each("hf llamafactory trl", "fsdp_config.{}"),
}
_ZERO = {
    "accelerate": f"deepspeed_config.{_OF_ZERO[0]}",
    "deepspeed": f"zero_optimization.{_GATHERS}",
    **each("hf llamafactory trl", f"deepspeed.zero_optimization.{_GATHERS}"),
}
"""Where each format has them."""
_SILENT = {"accelerate": "SHARDED_STATE_DICT", **each("hf llamafactory trl", "FULL_STATE_DICT")}
"""What a save holds where a file that is written does not say it (Accelerate 1.15.0, utils/dataclasses.py; transformers
5.24, training_args.py)."""
_NO_KEY = "a save holds the whole model there; {}"
_HERE = "unishard saves shards, and `unishard export` writes the whole model"


def carried(reading: ReadDocument, to: str) -> dict[Path, tuple[str, Any]]:
    """The key and the value in another format for each entry that speaks of files."""
    fsdp, zero = (
        reading.config.backend == "fsdp" and to != "deepspeed",
        reading.config.sharding.within_group == "full_shard",
    )
    found: dict[Path, tuple[str, Any]] = {}
    for entry in (entry for entry in reading.entries if entry.effect.fit is not Fit.UNSUPPORTED):
        name = _name(entry)
        if entry.assumed and not _kind(entry):
            continue
        if fsdp and _kind(entry) and _kind(entry) == _SILENT.get(to) and (entry.assumed or to not in _FSDP):
            found[entry.path] = "", None
        elif fsdp and to in _FSDP and (name == "cpu_ram_efficient_loading" or _kind(entry)):
            found[entry.path] = _FSDP[to].format(name), _kind(entry) or entry.value
        elif fsdp and to in _FSDP and name in _OF_ZERO and _is_on(entry.value):
            found[entry.path] = _FSDP[to].format(_FULL), "FULL_STATE_DICT"
        elif not fsdp and zero and to in _ZERO and (_is_full(entry) or name == _OF_ZERO[-1]):
            found[entry.path] = _ZERO[to], _is_full(entry) or _is_on(entry.value)
    return found if reading.config.sharding.strategy != "no_shard" else {}


def with_files(document: Native, keys: Iterable[tuple[str, Any]]) -> Native:
    """A document with what is carried."""
    for key, value in keys:
        document = merge(document, nested({key: value}) if key else {})
    return document


def described(item: Item, entry: Entry, found: dict[Path, tuple[str, Any]], to: str) -> Item:
    """The item of an entry that speaks of files: exact where it is carried, and never ignored where saves would hold
    less.
    """
    if entry.path in found:
        becomes = found[entry.path][0]
        return item._replace(fit=Fit.EXACT, becomes=becomes, note="" if becomes else "the same default there")
    whole = _is_full(entry) or (_name(entry) in _OF_ZERO and not entry.assumed and _is_on(entry.value))
    if item.fit is not Fit.IGNORED or not whole:
        return item
    if to == "unishard":
        return item._replace(fit=Fit.EQUIVALENT, note=_NO_KEY.format(_HERE), notable=item.assumed)
    note = _NO_KEY.format("gather it in your training script")
    return item._replace(fit=Fit.NEEDS_INPUT, note=note, notable=item.assumed)


def _name(entry: Entry) -> str:
    return entry.path[-1].removeprefix("fsdp_")


def _kind(entry: Entry) -> str:
    """How a save is split, in the words that FSDP2 has; empty where the entry does not say it, or says what only FSDP1
    has.
    """
    word = str(entry.value).rpartition(".")[2].upper().removesuffix("_STATE_DICT")
    return f"{word}_STATE_DICT" if _name(entry) == _FULL and word in ("FULL", "SHARDED") else ""


def _is_full(entry: Entry) -> bool:
    return _kind(entry) == "FULL_STATE_DICT"


def _is_on(value: Any) -> bool:
    return str(value).lower() in ("true", "1")


class Item(NamedTuple):
    """What became of one key."""

    key: str
    value: Any
    fit: Fit
    becomes: str
    """What says it in the other format, in words; empty where nothing does."""
    note: str
    line: int | None
    """Of the key in its file."""
    assumed: bool
    """Whether the document does not have the key, and its tool assumes this value."""
    notable: bool = False
    """Whether the default report has a line for it although it is assumed."""
    place: str = ""
    """Where the value comes from if not from the document: what was read beside it, or the default of that."""
    supplied: bool = False
    """Whether the key stands in what `--with` names, not in the document."""


def item_of(entry: Entry, reading: ReadDocument, target: Format, expressed: Rendered) -> Item:
    """What became of a key.

    Args:
        entry: The key.
        reading: The document that has it.
        target: The other format.
        expressed: What that makes of the config.
    """
    word = _unless_left(_result(entry, reading, target, expressed), entry, reading, target, expressed)
    line = None if entry.assumed or entry.supplied else reading.source.origins.of(entry.path).line
    notable = entry.assumed and entry.effect.notable
    return Item(
        entry.key,
        entry.value,
        word.fit,
        word.key,
        word.note,
        line,
        entry.assumed,
        notable,
        entry.place,
        entry.supplied,
    )


def _unless_left(
    word: FieldResult, entry: Entry, reading: ReadDocument, target: Format, expressed: Rendered
) -> FieldResult:
    """The result, which is exact for a default of the engine or a setting without a field where another tool drives the
    same engine.
    """
    if target.name == "unishard" or word.fit not in (Fit.EQUIVALENT, Fit.APPROXIMATE) or not stays_with_engine(reading):
        return word
    if (entry.effect.fields and not entry.assumed) or not left_to_engine(entry, expressed.document):
        return word
    return FieldResult(Fit.EXACT, "" if entry.assumed else entry.key, "the same default there" if entry.assumed else "")


def _result(entry: Entry, reading: ReadDocument, target: Format, expressed: Rendered) -> FieldResult:
    effect = entry.effect
    if as_it_is := expressed.fields.get(entry.as_it_is):
        return as_it_is
    if effect.fit is Fit.UNSUPPORTED:
        return FieldResult(Fit.UNSUPPORTED, "", effect.note)
    if effect.copy_verbatim and reading.format == target.name and effect.fields.keys() <= reading.undecided.keys():
        return FieldResult(Fit.EXACT, entry.key, "kept")
    own = _native_result(entry, reading, expressed) if effect.native else None
    if not effect.fields:
        return own or FieldResult(effect.fit, "", effect.note)
    if own is None:
        word = _field_result(entry, reading, expressed)
        silent = entry.assumed and reading.format == target.name and word.note.endswith(LEFT_OUT)
        left = f"{effect.note}; still left to it" if effect.notable else "still left to the tool's default"
        return FieldResult(Fit.EXACT, "", left) if silent else word
    said = _field_result(entry.but(Fit.EXACT, ""), reading, expressed)
    becomes, note = ", ".join(filter(None, (said.key, own.key))), "; ".join(filter(None, (said.note, own.note)))
    return FieldResult(worst(said.fit, own.fit), becomes, note)


def _native_result(entry: Entry, reading: ReadDocument, expressed: Rendered) -> FieldResult:
    """What became of settings that only one engine has: exact where the document that is written holds them, or says
    that it does.
    """
    words = [_native_setting(path, reading, expressed) for path in entry.effect.native]
    said = max(words, key=lambda word: word.fit.severity)
    if said.fit is Fit.EXACT:
        return FieldResult(Fit.EXACT, ", ".join(word.key for word in words), "")
    # What is lost where the setting is dropped, the key itself says.
    own = entry.effect.fit
    fit = own if said.fit is Fit.IGNORED else worst(own, said.fit)
    return FieldResult(fit, "", "; ".join(dict.fromkeys(filter(None, (entry.effect.note, said.note)))))


def _native_setting(path: str, reading: ReadDocument, expressed: Rendered) -> FieldResult:
    engine, _, key = path.partition(".")
    if engine != reading.config.backend:
        return FieldResult(Fit.IGNORED, "", "")
    if said := expressed.fields.get(f"native.{path}"):
        return said
    held = [name for name, _ in flat(expressed.document) if f".{key}." in f".{name}."]
    return FieldResult(Fit.EXACT, min(held, key=len), "") if held else FieldResult(Fit.IGNORED, "", "")


_SAID = FieldResult(Fit.EXACT, "", "")


def _left_to_the_tool(field: str, expressed: Rendered) -> bool:
    """Whether a document says nothing of an undecided field: neither `auto` nor a placeholder."""
    word = expressed.fields.get(field, _SAID)
    return (
        word.fit is Fit.NEEDS_INPUT
        and word.note != KEPT_AUTO
        and placeholder(field) not in dict(flat(expressed.document)).values()
    )


def _unknown(fields: list[str], reading: ReadDocument) -> FieldResult:
    """The outcome of a key with unknown fields that the other format cannot leave open: its tool's defaults would train
    differently.
    """
    who = reading.undecided[fields[0]].who
    note = f"{who}, says {', '.join(fields)}; add it, or {' '.join(f'--set {field}=...' for field in fields)}"
    return FieldResult(Fit.UNSUPPORTED, "", note)


def _field_result(entry: Entry, reading: ReadDocument, expressed: Rendered) -> FieldResult:
    """Of what the key means and what the other format makes of it, the worse."""
    own = entry.effect
    left = [field for field in own.fields if field in reading.undecided]
    if missing := [
        field for field in left if reading.undecided[field].required and _left_to_the_tool(field, expressed)
    ]:
        return _unknown(missing, reading)
    words = [expressed.fields[field] for field in own.fields if field in expressed.fields]
    said = worst(*(word.fit for word in words))
    fit, notes = worst(own.fit, said), [own.note] if own.fit is not Fit.EXACT or own.notable else []
    if own.fit is Fit.NEEDS_INPUT:
        # Whether it must be decided now is the other format's to say.
        fit, notes = said, notes if left and said is Fit.NEEDS_INPUT else []
    elif said is Fit.NEEDS_INPUT:
        notes += [f"{field} comes from {reading.undecided[field].who}" for field in left]
    notes += [word.note for word in words if word.note and word.fit is not Fit.EXACT] if said is not Fit.EXACT else []
    becomes = ", ".join(dict.fromkeys(word.key for word in words if word.key not in ("", NO_KEY)))
    return FieldResult(fit, becomes, "; ".join(dict.fromkeys(filter(None, notes))))
