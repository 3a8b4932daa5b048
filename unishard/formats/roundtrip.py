"""Writes a document in its own format again: only what was asked for changes, and everything else stays as it is in the
source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from unishard.config import Config, leaves, value_at
from unishard.config.nested import Native, flat, nested
from unishard.contract.entries import Entry, Path, Undecided
from unishard.contract.render import AUTO, Rendered
from unishard.contract.rules import NO_KEY, SCRIPT, Fit
from unishard.errors import ConfigError
from unishard.formats.format import Format
from unishard.formats.reading import ReadDocument

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
    if kept.pop(_HYSTERESIS, None) is not None and (said := _said(written, _HYSTERESIS)) is not None:
        kept[_HYSTERESIS] = said
    if _as_said(written, reading):
        for key in _KEPT_PARAMETERS:
            kept.pop(key, None)
            if (said := _said(written, key)) is not None or (
                said := _said(written, key.replace("stage3_", ""))
            ) is not None:
                kept[key] = said
    return nested(kept)


def _as_said(written: list[Entry], reading: ReadDocument) -> bool:
    """Whether the source says how long parameters stay, and the config still holds what it said."""
    said = [entry.effect.fields[_RESHARD] for entry in written if _RESHARD in entry.effect.fields]
    return bool(said) and all(value == value_at(reading.config, _RESHARD) for value in said)


def left_to_engine(entry: Entry, document: Native) -> bool:
    """Whether a document leaves to the engine what the source leaves to it, or repeats what the source says."""
    key = _plain(".".join(entry.path[-2:]))
    held = [value for name, value in flat(document) if f".{_plain(name)}".endswith(f".{key}")]
    return not held if entry.assumed else bool(held) and all(value == entry.value for value in held)


def _plain(key: str) -> str:
    """The key without the prefix that Accelerate gives FSDP's, and others do not."""
    block, _, name = key.rpartition(".")
    return f"{block}.{name.removeprefix('fsdp_')}"


def _is(entry: Entry, key: str) -> bool:
    return f".{entry.key}".endswith(f".{key}")


def _said(entries: list[Entry], key: str) -> Any:
    return next((entry.value for entry in entries if _is(entry, key)), None)


_MISSING: Any = object()
_ANEW = Undecided("its tool's current key")


def untouched(
    target: Format, reading: ReadDocument, after: Rendered, write: Callable[[ReadDocument], Native]
) -> Native | None:
    """The source's own document with what overrides change; None where its words do not say that.

    Args:
        target: The format, which is the source's.
        reading: What the source says, with the overrides.
        after: What says it in the words of the tool's current version.
        write: Writes a document.
    """
    # Ranks that the file names are its own; others were only told to us.
    told = reading.topology if target.ranks(reading.source) is None else None
    try:
        plain = target.read(reading.source, (), told)
        if any(_chosen(plain, name) != _chosen(reading, name) for name in ("optimizer.name", "scheduler.name")):
            return None  # arguments of one class are none of another's
        before = write(without_stale(plain))
        wanted = dict(_wanted(reading, plain, after))
        # What no longer counts, such as a loss scale in bf16, stays where it does no harm.
        candidates = (
            *_without_auto(plain, reading, before, after.document),
            *(
                changed(reading.source.data, plain.entries, before, after.document, removing=removing)
                for removing in (False, True)
            ),
        )
        for candidate in candidates:
            found = _with_repeated(candidate, plain, {field: wanted[field] for field in reading.decided})
            back = target.read(reading.source._replace(data=found), (), told)
            if _values(back) == wanted and not any(map(refused, back.entries)):
                return found
    except ConfigError:
        pass
    return None


def _without_auto(plain: ReadDocument, reading: ReadDocument, before: Native, after: Native) -> Iterator[Native]:
    """The document with only the values in place of `auto` that are decided now, and without one that follows from
    them, if it has any.
    """
    told = any(entry.place for entry in reading.entries)
    old, new = dict(flat(before)), dict(flat(after))
    follows = [entry.path for entry in reading.entries if entry.value == AUTO and entry.effect.rejected_upstream]
    stopped = [entry.path for entry in plain.entries if not entry.assumed and not goes_through(entry)]
    found = _without(plain.source.data, [*follows, *stopped])
    autos = [
        key
        for key, value in flat(found)
        if value == AUTO and key in new and (told or old.get(key, _MISSING) != new[key])
    ]
    for key in autos:
        found = _with(found, tuple(key.split(".")), new[key])
    if autos:
        yield found


def _with_repeated(document: Native, plain: ReadDocument, wanted: Mapping[str, Any]) -> Native:
    """The document with the new value at each of several keys that say the same: a batch size inside and around an
    engine's config.
    """
    old = _values(plain)
    for entry in plain.entries:
        fields = list(entry.effect.fields.items())
        if len(fields) != 1 or entry.assumed or fields[0][0] not in wanted:
            continue
        if wanted[fields[0][0]] != old[fields[0][0]] == entry.value:
            document = _with(document, entry.path, wanted[fields[0][0]])
    return document


def _wanted(reading: ReadDocument, plain: ReadDocument, after: Rendered) -> Iterator[tuple[str, Any]]:
    """What the document is to say of each field: what the format has no key for stays as it was."""
    as_it_was = _values(plain)
    for field, value in _values(reading).items():
        word = after.fields.get(field)
        nowhere = word is not None and (word.key in ("", NO_KEY, SCRIPT) or word.fit is Fit.NEEDS_INPUT)
        yield field, as_it_was[field] if nowhere else value


def _chosen(reading: ReadDocument, field: str) -> Any:
    """The value of a field; None where it is undecided."""
    return value_at(reading.config, field) if field in reading.decided else None


def _values(reading: ReadDocument) -> dict[str, Any]:
    """The value of each field; None for one that is undecided."""
    return {
        field: None if field in reading.undecided else value_at(reading.config, field) for field, _ in leaves(Config)
    }


def without_stale(reading: ReadDocument) -> ReadDocument:
    """The reading, without what keys say that their tool no longer takes as they are: that is written anew."""
    stale = [entry.effect for entry in reading.entries if entry.effect.rejected_upstream and not entry.assumed]
    fields = {field: _ANEW for effect in stale for field in effect.fields}
    keys = {key for effect in stale for key in effect.native}
    config = reading.config
    if keys:
        native = _without(config.native, [tuple(key.split(".")) for key in keys])
        config = config.model_copy(update={"native": native})
    return reading._replace(undecided={**reading.undecided, **fields}, config=config)


def changed(
    original: Mapping[str, Any], entries: Iterable[Entry], before: Native, after: Native, *, removing: bool = True
) -> Native:
    """A document with the differences between two others.

    Args:
        original: The document.
        entries: What it says; what is stale or not supported is left out.
        before: What is to be said of it as it stands.
        after: What is to be said instead.
        removing: Whether keys go that are only in `before`.
    """
    found = _without(original, [entry.path for entry in entries if not entry.assumed and not goes_through(entry)])
    old, new = dict(flat(before)), dict(flat(after))
    found = _without(found, [tuple(key.split(".")) for key in old if removing and key not in new])
    for key, value in new.items():
        if old.get(key, _MISSING) != value:
            found = _with(found, tuple(key.split(".")), value)
    return found


def refused(entry: Entry) -> bool:
    """Whether the tool itself does not take a key."""
    return entry.effect.fit is Fit.UNSUPPORTED and not entry.effect.copy_verbatim


def goes_through(entry: Entry) -> bool:
    """Whether a key may be repeated as it is."""
    return not (refused(entry) or entry.effect.rejected_upstream)


def stays(entry: Entry, original: Mapping[str, Any], document: Native) -> bool:
    """Whether a document has a key as the original has it, or the name of the file that has it."""
    path = entry.path
    while path and value_in(original, path) is None:
        path = path[:-1]
    return bool(path) and value_in(original, path) is not None and value_in(document, path) == value_in(original, path)


def value_in(document: Any, path: Path) -> Any:
    """What stands at a path; None where nothing does."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _with(document: Mapping[str, Any], path: Path, value: Any) -> Native:
    name, *below = path
    if not below:
        return {**document, name: value}
    inner = document.get(name)
    return {**document, name: _with(inner if isinstance(inner, Mapping) else {}, tuple(below), value)}


def _without(document: Mapping[str, Any], paths: Iterable[Path]) -> Native:
    found = dict(document)
    for path in paths:
        name, *below = path
        inner = found.get(name)
        if below and isinstance(inner, Mapping):
            rest = _without(inner, [tuple(below)])
            found = (
                {**found, name: rest}
                if rest or not inner
                else {key: value for key, value in found.items() if key != name}
            )
        elif not below:
            found.pop(name, None)
    return found
