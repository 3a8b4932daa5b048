"""Sets aside what depends on a switch that is set elsewhere, such as the loss scale of an fp16 that is `"auto"` or
overridden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unishard.config import Config
from unishard.config.loading.placeholders import needs
from unishard.config.nested import is_within
from unishard.config.section import needs_of
from unishard.contract.entries import Entry, Undecided
from unishard.contract.rules import Fit
from unishard.errors import in_parts


def without_unused(
    entries: Sequence[Entry], fields: Mapping[str, Any], faults: Mapping[str, str], changed: Collection[str]
) -> list[Entry]:
    """The entries without the fields that the schema refuses because a switch is set otherwise, by an override or not
    yet.

    Args:
        entries: What the document says.
        fields: The value of each field that it decides or leaves open.
        faults: What the schema refuses, and why, by field.
        changed: The fields that overrides decide.

    Returns:
        None of them if no fault is of this kind.
    """
    unused = {
        field: wanted
        for field, value in fields.items()
        if field in faults and (wanted := _open(field, value, fields, changed))
    }
    if not unused:
        return []
    return [new for entry in entries if (new := _without(entry, unused, faults, changed)) is not None]


def _open(field: str, value: Any, fields: Mapping[str, Any], changed: Collection[str]) -> Mapping[str, Any]:
    """What the value needs, if the document leaves that open, or an override sets it otherwise."""
    if is_within(field, changed):
        return {}
    asked = needs(field, value)
    marks = [need.when for need in needs_of(Config).get(field, ()) if need.refusal]
    return {
        switch: values
        for need in (*asked, *marks)
        for switch, values in need.items()
        if is_within(switch, changed) or (need in asked and isinstance(fields.get(switch), Undecided))
    }


def _without(
    entry: Entry, unused: Mapping[str, Mapping[str, Any]], faults: Mapping[str, str], changed: Collection[str]
) -> Entry | None:
    dropped = [field for field in entry.effect.fields if field in unused]
    if not dropped:
        return entry
    rest = {field: value for field, value in entry.effect.fields.items() if field not in unused}
    if rest or entry.assumed:
        return entry._replace(effect=entry.effect._replace(fields=rest)) if rest else None
    switch, values = next(iter(unused[dropped[0]].items()))
    if decided := is_within(switch, changed):
        fit, note = Fit.IGNORED, in_parts(faults[dropped[0]])[0]
    else:
        fit, note = (
            Fit.NEEDS_INPUT,
            f"only counts if {switch} is {' or '.join(map(str, values))}; add --set {switch}=...",
        )
    return entry._replace(effect=entry.effect._replace(fit=fit, note=note, fields={}, copy_verbatim=not decided))
