"""What engines are told about files, and no field of the config says: whether a save holds the whole model, and how one
is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from unishard.config.nested import Native, merge, nested
from unishard.contract.entries import Entry, Path
from unishard.contract.rules import Fit
from unishard.formats.reading import ReadDocument

if TYPE_CHECKING:
    from unishard.formats.items import Item
from unishard.formats.names import each

__all__ = ["carried", "described", "with_files"]

_FULL = "state_dict_type"
_LOADS = "cpu_ram_efficient_loading"
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
    "swift": "fsdp.fsdp_config.{}",
    **each("axolotl hf llamafactory trl", "fsdp_config.{}"),
}
_ZERO = {
    "accelerate": f"deepspeed_config.{_OF_ZERO[0]}",
    "deepspeed": f"zero_optimization.{_GATHERS}",
    **each("axolotl hf llamafactory swift trl", f"deepspeed.zero_optimization.{_GATHERS}"),
}
"""Where each format has them."""
_NO_KEY = "a save holds the whole model there; {}"
_HERE = "unishard saves shards, and `unishard export` writes the whole model"


def carried(reading: ReadDocument, to: str) -> dict[Path, tuple[str, Any]]:
    """The key and the value in another format for each entry that speaks of files."""
    before = next(
        (entry.effect.fields["backend"] for entry in reading.entries if "backend" in entry.effect.fields), None
    )
    if reading.format == to and before == reading.config.backend:
        return {}
    fsdp, zero = (
        reading.config.backend == "fsdp" and to != "deepspeed",
        reading.config.sharding.strategy == "full_shard",
    )
    found = {}
    for entry in _written(reading.entries):
        name = _name(entry)
        if fsdp and to in _FSDP and (name == _LOADS or _kind(entry)):
            found[entry.path] = _FSDP[to].format(name), _kind(entry) or entry.value
        elif fsdp and to in _FSDP and name in _OF_ZERO and _is_on(entry.value):
            found[entry.path] = _FSDP[to].format(_FULL), "FULL_STATE_DICT"
        elif not fsdp and zero and to in _ZERO and (_is_full(entry) or name == _OF_ZERO[-1]):
            found[entry.path] = _ZERO[to], _is_full(entry) or _is_on(entry.value)
    return found if reading.config.sharding.strategy != "no_shard" else {}


def with_files(document: Native, keys: Iterable[tuple[str, Any]]) -> Native:
    """A document with what is carried."""
    for key, value in keys:
        document = merge(document, nested({key: value}))
    return document


def described(item: Item, entry: Entry, found: dict[Path, tuple[str, Any]], to: str) -> Item:
    """The item of an entry that speaks of files: exact where it is carried, and never ignored where saves would hold
    less.
    """
    if entry.path in found:
        return item._replace(fit=Fit.EXACT, becomes=found[entry.path][0], note="")
    whole = _is_full(entry) or (_name(entry) in _OF_ZERO and _is_on(entry.value))
    if item.fit is not Fit.IGNORED or item.assumed or not whole:
        return item
    if to == "unishard":
        return item._replace(fit=Fit.EQUIVALENT, note=_NO_KEY.format(_HERE))
    return item._replace(fit=Fit.NEEDS_INPUT, note=_NO_KEY.format("gather it in your training script"))


def _written(entries: Iterable[Entry]) -> Iterable[Entry]:
    return (entry for entry in entries if not entry.assumed and entry.effect.fit is not Fit.UNSUPPORTED)


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
