"""What another tool's file and a translation of it leave to the engine that both drive."""

from __future__ import annotations

from typing import Any

from unishard.config import value_at
from unishard.config.nested import Native, flat, nested
from unishard.contract.entries import Entry
from unishard.contract.rules import Fit
from unishard.formats.reading.document import ReadDocument

_ONLY_DECIDED = {
    "data_types.grad_accum_dtype": "precision.accumulate",
    "zero_optimization.reduce_bucket_size": "communication.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size": "communication.prefetch_bucket_size",
    "zero_optimization.overlap_comm": "communication.overlap",
    "zero_optimization.stage3_max_reuse_distance": "sharding.reshard_after_forward",
    "zero_optimization.stage3_max_live_parameters": "sharding.reshard_after_forward",
    "bf16.check_grad_overflow": "training.nonfinite",
}
"""Keys of DeepSpeed's JSON that are written only where their field is decided."""
_ROUNDING = ("optimizer.params.torch_adam", "zero_optimization.memory_efficient_linear", "zero_force_ds_cpu_optimizer")
"""Settings with which DeepSpeed rounds as torch does; a config that was DeepSpeed's own before keeps its kernels."""
_HYSTERESIS = "fp16.hysteresis"
_KEPT_PARAMETERS = ("zero_optimization.stage3_max_reuse_distance", "zero_optimization.stage3_max_live_parameters")
"""Sizes of which unishard's field knows only whether they keep parameters: those of the source hold on the same
engine."""
_RESHARD = "sharding.reshard_after_forward"


def stays_with_engine(reading: ReadDocument) -> bool:
    """Whether another tool than unishard drove the engine before, and overrides choose no other."""
    before = next(
        (entry.effect.fields["backend"] for entry in reading.entries if "backend" in entry.effect.fields), None
    )
    return reading.format != "unishard" and before == reading.config.backend


def without_unishards(document: Native, reading: ReadDocument) -> Native:
    """DeepSpeed's JSON without what only unishard decides, where the source's own tool drives DeepSpeed."""
    if not stays_with_engine(reading):
        return document
    written = [entry for entry in reading.entries if not entry.assumed and entry.effect.fit is not Fit.UNSUPPORTED]
    fields = {field for entry in written for field in entry.effect.fields}
    fields |= reading.decided - {field for entry in reading.entries for field in entry.effect.fields}
    there = {key for key in _ROUNDING if any(_is(entry, key) for entry in written)}
    kept = {
        key: value
        for key, value in flat(document)
        if (key not in _ROUNDING or key in there) and (key not in _ONLY_DECIDED or _ONLY_DECIDED[key] in fields)
    }
    if kept.pop(_HYSTERESIS, None) is not None and (original := _said(written, _HYSTERESIS)) is not None:
        kept[_HYSTERESIS] = original
    if _as_said(written, reading):
        for key in _KEPT_PARAMETERS:
            kept.pop(key, None)
            if (original := _said(written, key)) is not None or (
                original := _said(written, key.replace("stage3_", ""))
            ) is not None:
                kept[key] = original
    return nested(kept)


def _as_said(written: list[Entry], reading: ReadDocument) -> bool:
    """Whether the source says how long parameters stay, and the config still holds what it said."""
    values = [entry.effect.fields[_RESHARD] for entry in written if _RESHARD in entry.effect.fields]
    return bool(values) and all(value == value_at(reading.config, _RESHARD) for value in values)


def of_engine(entry: Entry, document: Native) -> dict[str, Any]:
    """What a document says of the engine's setting that a key of another speaks of, by dotted key."""
    key = _plain(".".join(entry.path[-2:]))
    return {name: value for name, value in flat(document) if f".{_plain(name)}".endswith(f".{key}")}


def _plain(key: str) -> str:
    """The key without the prefix that Accelerate gives FSDP's, and others do not."""
    block, _, name = key.rpartition(".")
    return f"{block}.{name.removeprefix('fsdp_')}"


def _is(entry: Entry, key: str) -> bool:
    return f".{entry.key}".endswith(f".{key}")


def _said(entries: list[Entry], key: str) -> Any:
    return next((entry.value for entry in entries if _is(entry, key)), None)
