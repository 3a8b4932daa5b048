"""How a save holds the weights, whole or in shards: carried into the key that the other format has for it, beside the
config, which does not say it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unishard.config.nested import Native, merge, nested
from unishard.contract.entries import Entry, Path
from unishard.contract.key_rows import is_true
from unishard.contract.render import FieldResult
from unishard.contract.rules import Fit
from unishard.formats.names import each
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.items import SAME_DEFAULT, Item

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
_HERE = "unishard saves shards, and `unishard checkpoint export` writes the whole model"


def carried(reading: ReadDocument, to: str) -> dict[Path, tuple[str, Any]]:
    """The key and the value in another format for each entry that speaks of files."""
    fsdp, zero = (
        reading.config.backend == "fsdp" and to != "deepspeed",
        reading.config.sharding.within_group == "full_shard",
    )
    carried_keys: dict[Path, tuple[str, Any]] = {}
    for entry in (entry for entry in reading.entries if entry.effect.fit is not Fit.UNSUPPORTED):
        name = _name(entry)
        if entry.assumed and not _kind(entry):
            continue
        if fsdp and _kind(entry) and _kind(entry) == _SILENT.get(to) and (entry.assumed or to not in _FSDP):
            carried_keys[entry.path] = "", None
        elif fsdp and to in _FSDP and (name == "cpu_ram_efficient_loading" or _kind(entry)):
            carried_keys[entry.path] = _FSDP[to].format(name), _kind(entry) or entry.value
        elif fsdp and to in _FSDP and name in _OF_ZERO and is_true(entry.value):
            carried_keys[entry.path] = _FSDP[to].format(_FULL), "FULL_STATE_DICT"
        elif not fsdp and zero and to in _ZERO and (_is_full(entry) or name == _OF_ZERO[-1]):
            carried_keys[entry.path] = _ZERO[to], _is_full(entry) or is_true(entry.value)
    return carried_keys if reading.config.sharding.strategy != "no_shard" else {}


def with_files(document: Native, keys: Iterable[tuple[str, Any]]) -> Native:
    """A document with what is carried."""
    for key, value in keys:
        document = merge(document, nested({key: value}) if key else {})
    return document


def described(item: Item, carried_keys: dict[Path, tuple[str, Any]], to: str) -> Item:
    """The item of a key that speaks of files: exact where it is carried, and never ignored where saves would
    hold less.
    """
    entry = item.entry
    if entry.path in carried_keys:
        key = carried_keys[entry.path][0]
        if not key:
            return item._replace(fit=Fit.EXACT, written=(), reasons=(SAME_DEFAULT,))
        return item._replace(fit=Fit.EXACT, written=(FieldResult.held(key),), reasons=())
    whole = _is_full(entry) or (_name(entry) in _OF_ZERO and not entry.assumed and is_true(entry.value))
    if item.fit is not Fit.IGNORED or not whole:
        return item
    if to == "unishard":
        return item._replace(fit=Fit.EQUIVALENT, reasons=(_NO_KEY.format(_HERE),), notable=item.assumed)
    note = _NO_KEY.format("gather it in your training script")
    return item._replace(fit=Fit.NEEDS_INPUT, reasons=(note,), notable=item.assumed)


def _name(entry: Entry) -> str:
    return entry.path[-1].removeprefix("fsdp_")


def _kind(entry: Entry) -> str:
    """How a save is split, in the words that FSDP2 has; empty where the entry does not say it, or says what only FSDP1
    has.
    """
    kind = str(entry.value).rpartition(".")[2].upper().removesuffix("_STATE_DICT")
    return f"{kind}_STATE_DICT" if _name(entry) == _FULL and kind in ("FULL", "SHARDED") else ""


def _is_full(entry: Entry) -> bool:
    return _kind(entry) == "FULL_STATE_DICT"
