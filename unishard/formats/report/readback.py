"""Joins by field what a source says, what is written of it, and what that means to its own tool once it is read back;
the lines of the report and the changes are views of this.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.loading import Origin, Origins
from unishard.config.nested import Native, flat, is_within
from unishard.contract.fallbacks import FALLBACKS
from unishard.contract.render import AUTO, FieldResult
from unishard.contract.rules import Fit, worst
from unishard.formats.files.source import Source
from unishard.formats.format import Format
from unishard.formats.reading.document import ReadDocument
from unishard.formats.report.comparing import FieldRow, join
from unishard.formats.report.items import SAME_DEFAULT, Item

_CLOSE = 1e-9
_CLIPPING = "training.gradient_clipping"
_AS_IT_IS = "needs no key there: it is so without one"
_NOT_TRAINING = ("launch.", "logging.", "profile.")
"""Sections that train nothing; the number of ranks is compared."""
_FACTORS = {"training.micro_batch_size", "training.gradient_accumulation_steps"}
_IMPLIES = {
    "sharding.strategy": ("sharding.reshard_after_forward", "sharding.group_size"),
    "precision.compute": ("precision.loss_scale",),
}
"""Fields of which the line of another speaks as well."""


def read_back(target: Format, document: Native, reading: ReadDocument) -> ReadDocument:
    """What a document that was written means to its own tool.

    Raises:
        ConfigError: It cannot be read.
    """
    return target.read(Source("", document, Origins(Origin("")), folder=reading.source.folder), (), reading.topology)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal, numbers to rounding."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (first, second))
    return math.isclose(first, second, rel_tol=_CLOSE) if numbers else bool(first == second)


class Join:
    """What a source says of each field, what became of it, and what the document that was written means.

    Args:
        reading: What the source says.
        written: What became of each field.
        back: What was written, read back.

    Attributes:
        different: The rows of what the translation decides otherwise, by field. What the script decides on both sides,
            or what has no effect, is no difference.
    """

    def __init__(self, reading: ReadDocument, written: Mapping[str, FieldResult], back: ReadDocument) -> None:
        self._reading, self._back = reading, back
        self._held = dict(flat(back.source.data))
        self._rows = {row.field: row for row in join(reading, back, written)}
        self.different = {field: row for field, row in self._rows.items() if row.differs and not self._same_effect(row)}

    def lines(self, items: Collection[Item]) -> Iterator[Item]:
        """The items, where one that says nothing of a difference in its fields says it.

        What no key there says is not exact.
        """
        named = self._named(items)
        for item in items:
            fields = [field for field in item.entry.effect.sayings if field not in named]
            lost = self._is_lost(item)
            # The tool does by itself what the script is to do, though nothing in its file says it.
            silent = item.fit is Fit.EXACT and item.by_script
            here = [field for field in fields if self._differs(field, silent=silent) or (lost and self._counts(field))]
            fits = [self._outcome(field) for field in here]
            if fits:
                fit = worst(item.fit, *(fit for fit, _ in fits))
                written = item.written if fit is not Fit.IGNORED else ()
                yield item._replace(fit=fit, written=written, reasons=(*item.reasons, *(why for _, why in fits)))
            elif lost:
                usual = item.entry.usual
                fit, why = (Fit.EXACT, SAME_DEFAULT) if usual else (Fit.IGNORED, _AS_IT_IS)
                yield item._replace(fit=fit, written=(), reasons=(why,))
            else:
                yield item

    def changes(self, items: Collection[Item]) -> tuple[FieldRow, ...]:
        """The differences in fields that no key of the source decides.

        Before, a value is said by the tool of the source, by its default, or left to the training script. After, `auto`
        is what the training script, or the tool around it, decides; the origin is a note on what decides it now.
        """
        named = self._named(items)
        listed = {field for entry in self._reading.entries for field in entry.effect.fields}
        return tuple(self._change(row) for row in self.different.values() if row.field not in named | listed)

    def refusals(self, tool: str) -> Iterator[str]:
        """What a tool refuses in a translation, in words."""
        for entry in self._back.entries:
            if entry.refused_by_its_tool:
                yield f"{tool} refuses {entry.key} = {shown(entry.value)} of this translation: {entry.effect.note}"

    def _same_effect(self, row: FieldRow) -> bool:
        a, b = row.before, row.after
        equal = a.said and b.said and same(a.value, b.value)
        if row.field == _CLIPPING and self._back.config.backend == "deepspeed" and self._other_engine():
            return equal  # where DeepSpeed clips, the script's clip_grad_norm_ does nothing
        if row.field.startswith("native.") and a.said:
            name = row.field.split(".", 2)[-1]
            return any(f".{key}".endswith(f".{name}") and same(held, a.value) for key, held in self._held.items())
        if equal or row.field.startswith(_NOT_TRAINING) or not (a.said or b.said):
            return True
        if row.field == "backend" and self._reading.format != self._back.format:
            return True  # `--to` asks for the engine
        if row.field == "training.global_batch_size" and b.value is None:
            return self._back.decided - self._back.undecided.keys() >= _FACTORS
        return _idle(row.field, self._reading.config) and _idle(row.field, self._back.config)

    def _other_engine(self) -> bool:
        """Whether the source's own tool drives another engine than the config."""
        backend = self._reading.config.backend
        effects = (entry.effect.fields for entry in self._reading.entries)
        return next((fields["backend"] for fields in effects if "backend" in fields), backend) != backend or (
            backend != "deepspeed"
        )

    def _differs(self, field: str, *, silent: bool) -> bool:
        return field in self.different and (self.different[field].after.said or not silent)

    def _counts(self, field: str) -> bool:
        """Whether somebody must do what the field says."""
        return self._depends(field) or not _idle(field, self._reading.config)

    def _depends(self, field: str) -> bool:
        """Whether what a field comes to depends on a dtype that only the training script knows."""
        return field.startswith("precision.") and "precision.compute" in self._reading.undecided

    def _is_lost(self, item: Item) -> bool:
        """Whether a key of the document that counts as exact is in no key of the other."""
        effect, back = item.entry.effect, self._back
        if item.fit is not Fit.EXACT or item.assumed or item.note or item.by_script:
            return False
        if effect.native or self._reading.format == back.format:
            return False
        silent = (back.decided | back.undecided.keys()).isdisjoint(effect.fields)
        return silent and not any(is_within(key, item.keys) for key in self._held)

    def _outcome(self, field: str) -> tuple[Fit, str]:
        """How much a difference counts, in words."""
        row, config = self._rows[field], self._reading.config
        if self._depends(field):
            return Fit.NEEDS_INPUT, "only written where the dtype is known; add --set precision.compute=..."
        silent = not row.after.said and field in FALLBACKS and not _idle(field, config)
        if silent or field not in self.different:
            if row.written and row.written.fit is not Fit.EXACT:
                return row.written.fit, row.written.note
            fit, note = FALLBACKS[field].outcome(field, config)
            return fit, f"{field}: {note}"
        if not row.after.said and row.after.value is None:
            return Fit.NEEDS_INPUT, f"{field} depends there on {row.after.origin}"
        where = f"{self._back.format} assumes it" if not row.after.said else row.after.origin
        return Fit.APPROXIMATE, f"{field} is {shown(row.after.value)} there ({where})"

    def _named(self, items: Collection[Item]) -> set[str]:
        """The fields of which a line says that they are not kept as they are."""
        fields: set[str] = set()
        lost: set[str] = set()
        for item in items:
            effect = item.entry.effect
            if item.fit is Fit.EXACT and item.keys:
                fields |= {f"native.{key}" for key in effect.native}
            elif item.fit is Fit.EQUIVALENT:
                fields |= {field for field in effect.fields if field.startswith("sharding.")}
            elif item.fit is not Fit.EXACT and not (item.fit is Fit.IGNORED and item.assumed and not item.notable):
                lost |= {*effect.sayings, *effect.decides}
        exact = {key for item in items if item.fit is Fit.EXACT for key in item.keys}
        for row in self.different.values():
            there = row.after.entry.effect.fields.keys() if row.after.said and row.after.entry else ()
            if lost.intersection(there) or (row.field.startswith("native.") and row.after.key in exact):
                fields.add(row.field)
        fields |= lost
        return fields | {other for field in fields for other in _IMPLIES.get(field, ())}

    def _change(self, row: FieldRow) -> FieldRow:
        decided = self._reading.decides(row.field)
        before = row.before._replace(said=decided)
        value = AUTO if row.after.open else row.after.value
        note = f"{self._back.format} has no key for it" if row.after.silent else row.after.origin
        if row.field == _CLIPPING and self._back.config.backend == "deepspeed" and not decided:
            before = before._replace(value=None, said=True)
            note += "; the script's clip_grad_norm_ does nothing with DeepSpeed"
        return row._replace(before=before, after=row.after._replace(value=value, origin=note))


def _idle(field: str, config: Config) -> bool:
    """Whether a config needs nobody to do what the field says."""
    return field in FALLBACKS and FALLBACKS[field].outcome(field, config)[0] is Fit.EXACT
