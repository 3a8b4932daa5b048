"""What a translation means otherwise than its source: it is read back, and each difference is reported."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.loading import Origin, Origins
from unishard.config.nested import Native, flat
from unishard.contract.fallbacks import FALLBACKS
from unishard.contract.render import AUTO, FieldResult
from unishard.contract.rules import SCRIPT, Fit, worst
from unishard.formats.comparing import Difference, compare
from unishard.formats.format import Format
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source

if TYPE_CHECKING:
    from unishard.formats.items import Item

_CLOSE = 1e-9
_CLIPPING = "training.gradient_clipping"
_WORD = re.compile(r"[A-Za-z_][\w.]*")
_AS_IT_IS = "needs no key there: it is so without one"


def read_back(target: Format, document: Native, reading: ReadDocument) -> ReadDocument:
    """What a document that was written means to its own tool.

    Raises:
        ConfigError: It cannot be read.
    """
    return target.read(Source("", document, Origins(Origin("")), folder=reading.source.folder), (), reading.topology)


def differences(reading: ReadDocument, back: ReadDocument) -> dict[str, Difference]:
    """By field, what a translation decides otherwise.

    What the script decides on both sides, or what has no effect, is no difference.
    """
    return {found.field: found for found in compare(reading, back) if not _same_effect(found, reading, back)}


def _same_effect(difference: Difference, reading: ReadDocument, back: ReadDocument) -> bool:
    a, b = difference.before, difference.after
    if difference.field == _CLIPPING and _other_engine(reading) and back.config.backend == "deepspeed":
        return (
            a.said and b.said and same(a.value, b.value)
        )  # where DeepSpeed clips, the script's clip_grad_norm_ does nothing
    if difference.field.startswith(("launch.", "logging.", "profile.")):
        return True  # nothing that trains; the number of ranks is compared
    if difference.field.startswith("native.") and a.said:
        name = difference.field.split(".", 2)[-1]
        return any(f".{key}".endswith(f".{name}") and same(held, a.value) for key, held in flat(back.source.data))
    if not (a.said or b.said) or (difference.field == "backend" and reading.format != back.format):
        return True  # nobody but the script decides, or `--to` asks for the engine
    if a.said and b.said and same(a.value, b.value):
        return True
    if difference.field == "training.global_batch_size" and b.value is None:
        return {
            "training.micro_batch_size",
            "training.gradient_accumulation_steps",
        } <= back.decided - back.undecided.keys()
    return _idle(difference.field, reading.config) and _idle(difference.field, back.config)


def _other_engine(reading: ReadDocument) -> bool:
    """Whether the source's own tool drives another engine than the config."""
    engines = (entry.effect.fields["backend"] for entry in reading.entries if "backend" in entry.effect.fields)
    return next(engines, reading.config.backend) != reading.config.backend or reading.config.backend != "deepspeed"


def _depends(field: str, reading: ReadDocument) -> bool:
    """Whether what a field comes to depends on a dtype that only the training script knows."""
    return field.startswith("precision.") and "precision.compute" in reading.undecided


def _idle(field: str, config: Config) -> bool:
    """Whether a config needs nobody to do what the field says."""
    return field in FALLBACKS and FALLBACKS[field].outcome(field, config)[0] is Fit.EXACT


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal, numbers to rounding."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second))
    return math.isclose(first, second, rel_tol=_CLOSE) if numbers else bool(first == second)


def with_differences(
    items: Collection[Item],
    by_field: Mapping[str, Difference],
    reading: ReadDocument,
    back: ReadDocument,
    words: Mapping[str, FieldResult],
) -> Iterator[Item]:
    """The items, where one that says nothing of a difference in its fields says it.

    What no key there says is not exact.
    """
    named = _named(items, by_field)
    for item in items:
        fields = [*item.entry.effect.fields, *(f"native.{key}" for key in item.entry.effect.native)]
        lost = reading.format != back.format and not item.entry.effect.native and _is_lost(item, fields, back)
        by_itself = (
            item.fit is Fit.EXACT and SCRIPT in item.becomes
        )  # the tool does the same, though nothing in its file says it
        outside = {field for field, one in by_field.items() if one.after.said or not by_itself}
        here = [
            field
            for field in fields
            if field not in named
            and (field in outside or (lost and (_depends(field, reading) or not _idle(field, reading.config))))
        ]
        fits = [_outcome(field, by_field.get(field), reading, back, words) for field in here]
        if not fits:
            yield item._replace(fit=Fit.IGNORED, becomes="", note=_AS_IT_IS) if lost else item
            continue
        fit = worst(item.fit, *(fit for fit, _ in fits))
        notes = dict.fromkeys(filter(None, (item.note, *(note for _, note in fits))))
        yield item._replace(fit=fit, becomes=item.becomes if fit is not Fit.IGNORED else "", note="; ".join(notes))


def _is_lost(item: Item, fields: Collection[str], back: ReadDocument) -> bool:
    """Whether a key of the document that counts as exact is in no key of the other."""
    if item.fit is not Fit.EXACT or item.assumed or item.note or SCRIPT in item.becomes:
        return False
    silent = all(field not in back.decided and field not in back.undecided for field in fields)
    keys = [f".{key}." for key, _ in flat(back.source.data)]
    return silent and not any(f".{word}." in key for word in _WORD.findall(item.becomes) for key in keys)


def _outcome(
    field: str,
    difference: Difference | None,
    reading: ReadDocument,
    back: ReadDocument,
    words: Mapping[str, FieldResult],
) -> tuple[Fit, str]:
    """How much a difference counts, in words."""
    if _depends(field, reading):
        return Fit.NEEDS_INPUT, "only written where the dtype is known; add --set precision.compute=..."
    if difference is None or (not difference.after.said and field in FALLBACKS and not _idle(field, reading.config)):
        fit, note = FALLBACKS[field].outcome(field, reading.config)
        own = words.get(field)
        return (own.fit, own.note) if own and own.fit is not Fit.EXACT else (fit, f"{field}: {note}")
    if not difference.after.said and difference.after.value is None:
        return Fit.NEEDS_INPUT, f"{field} depends there on {difference.after.origin}"
    where = f"{back.format} assumes it" if not difference.after.said else difference.after.origin
    return Fit.APPROXIMATE, f"{field} is {shown(difference.after.value)} there ({where})"


def refusals(back: ReadDocument, tool: str) -> Iterator[str]:
    """What a tool refuses in a translation, in words."""
    for entry in back.entries:
        if entry.refused_by_its_tool:
            yield f"{tool} refuses {entry.key} = {shown(entry.value)} of this translation: {entry.effect.note}"


def changes(
    by_field: Mapping[str, Difference], reading: ReadDocument, back: ReadDocument, items: Collection[Item]
) -> tuple[Difference, ...]:
    """The differences in fields that no key of the source decides.

    Before, a value is said by the tool of the source, by its default, or left to the training script. After, `auto` is
    what the training script, or the tool around it, decides; the origin is a note on what decides it now.
    """
    named = _named(items, by_field)
    listed = {field for entry in reading.entries for field in entry.effect.fields}
    return tuple(_change(one, reading, back) for one in by_field.values() if one.field not in named | listed)


def _change(difference: Difference, reading: ReadDocument, back: ReadDocument) -> Difference:
    decided = reading.decides(difference.field)
    before = difference.before._replace(said=decided)
    value = AUTO if difference.after.open else difference.after.value
    note = f"{back.format} has no key for it" if difference.after.silent else difference.after.origin
    if difference.field == _CLIPPING and back.config.backend == "deepspeed" and not decided:
        before = before._replace(value=None, said=True)
        note += "; the script's clip_grad_norm_ does nothing with DeepSpeed"
    return Difference(difference.field, before, difference.after._replace(value=value, origin=note))


_IMPLIES = {
    "sharding.strategy": ("sharding.reshard_after_forward", "sharding.group_size"),
    "precision.compute": ("precision.loss_scale",),
}
"""Fields of which the line of another speaks as well."""


def _named(items: Collection[Item], by_field: Mapping[str, Difference]) -> set[str]:
    """The fields of which a line says that they are not kept as they are."""
    fields = set()
    for item in items:
        effect = item.entry.effect
        if item.fit is Fit.EXACT and item.becomes:
            fields |= {f"native.{key}" for key in effect.native}
        elif item.fit is Fit.EQUIVALENT:
            fields |= {field for field in effect.fields if field.startswith("sharding.")}
        elif item.fit is not Fit.EXACT and not (item.fit is Fit.IGNORED and item.assumed and not item.notable):
            fields |= {*effect.fields, *effect.decides, *(f"native.{key}" for key in effect.native)}
    keys = {
        key for item in items if item.fit not in (Fit.EXACT, Fit.EQUIVALENT) for key in item.becomes.split(", ") if key
    }
    carried = {item.becomes for item in items if item.fit is Fit.EXACT}
    fields |= {
        path
        for path, one in by_field.items()
        if one.after.key in keys or (path.startswith("native.") and one.after.key in carried)
    }
    return fields | {other for field in fields for other in _IMPLIES.get(field, ())}
