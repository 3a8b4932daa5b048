"""Write a translation report: as text, JSON, or Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from unishard.contract.rules import Fit
from unishard.errors import printable

if TYPE_CHECKING:
    from unishard.formats import Item, Outcome
    from unishard.formats.report.comparing import FieldRow
from unishard.cli.text_report import (
    BY_SCRIPT,
    LOUD,
    is_left_to_script,
    key_value,
    listed,
    needs_input,
    set_by,
    value_of,
    write_text,
)

_ORDER = (Fit.EXACT, Fit.EQUIVALENT, Fit.IGNORED, Fit.APPROXIMATE, Fit.NEEDS_INPUT, Fit.UNSUPPORTED)
"""In the counts."""


class ReportForm(StrEnum):
    """Form of the report."""

    TEXT = "text"
    """The keys of the file but for those that are exact, and the tool defaults that need attention."""
    FULL = "full"
    """Also what is exact, and all tool defaults."""
    JSON = "json"
    """Everything as one JSON object."""
    MARKDOWN = "markdown"
    """As text, in Markdown."""
    NONE = "none"


def write_report(outcome: Outcome, form: ReportForm, file: TextIO) -> None:
    """Write a translation report to a stream."""
    match form:
        case ReportForm.JSON:
            file.write(json.dumps(_object(outcome), indent=2) + "\n")
        case ReportForm.MARKDOWN:
            file.write(printable(_markdown(outcome)))
        case ReportForm.TEXT | ReportForm.FULL:
            write_text(outcome, file, full=form is ReportForm.FULL)


def _counts_of(items: Sequence[Item]) -> str:
    """Count the fits: `4 exact, 1 unsupported`."""
    counts = [(fit, sum(item.fit is fit for item in items)) for fit in _ORDER]
    return ", ".join(f"{count} {fit}" for fit, count in counts if count) or "no keys"


def _object(outcome: Outcome) -> dict[str, Any]:
    fields = (
        "key",
        "value",
        "fit",
        "becomes",
        "note",
        "line",
        "assumed",
        *(("place", "supplied") if outcome.supplied else ()),
    )
    names = {"supplied": "beside"}
    return {
        "file": outcome.reading.source.name,
        "from": outcome.reading.format,
        "to": outcome.to,
        "backend": outcome.reading.config.backend,
        "summary": {str(fit): len(outcome.of(fit)) for fit in _ORDER},
        "needs_input": needs_input(outcome),
        "launch": outcome.launch,
        "warnings": list(outcome.warnings),
        **({"not_understood": list(outcome.supplied.unknown)} if outcome.supplied else {}),
        "dropped": [
            {"key": one.key, "value": plain(one.value), "line": one.line, "effect": one.effect}
            for one in outcome.dropped
        ],
        "changes": [_change(one) for one in outcome.changes],
        "items": [{names.get(name, name): plain(getattr(item, name)) for name in fields} for item in outcome.items],
    }


def _change(one: FieldRow) -> dict[str, Any]:
    return {
        "field": one.field,
        "before": plain(one.before.value),
        "after": plain(one.after.value),
        "said": one.before.said,
        "note": one.after.origin,
    }


def plain(value: Any) -> Any:
    """Convert a value to JSON; dates and non-finite numbers become strings."""
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def _markdown(outcome: Outcome) -> str:
    name = outcome.reading.source.name or "config"
    lines = [f"**{_escaped(name)}**: {outcome.reading.format} → {outcome.to} ({_counts_of(outcome.items)})", ""]
    lines += [f"> warning: {_escaped(warning)}\n" for warning in outcome.warnings]
    lines += ["| line | key = value | fit | becomes | note |", "|---|---|---|---|---|"]
    for item in listed(outcome):
        word = BY_SCRIPT if is_left_to_script(item, outcome) else str(item.fit)
        fit = f"**{word}**" if item.fit in LOUD else word
        line = "" if item.line is None else str(item.line)
        said = [_code(f"--set {each}") for each in set_by(item, outcome)]
        note = "; ".join(filter(None, (_escaped(item.note), *said)))
        cells = (line, _code(key_value(item)), fit, _code(item.becomes), note)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *(f"- `{path}` comes from {_escaped(who)}: `--set {path}=VALUE`" for path, who in needs_input(outcome).items()),
    ]
    lines += [
        f"- changes: `{one.field}` from {_code(value_of(one.before.value))} to {_code(value_of(one.after.value))}"
        for one in outcome.changes
    ]
    dropped = [(_code(f"{one.key} = {value_of(one.value)}"), one.effect) for one in outcome.dropped]
    lines += [f"- dropped: {key}{effect and f': {_escaped(effect)}'}" for key, effect in dropped]
    return "\n".join(lines).rstrip() + "\n"


def _code(text: str) -> str:
    """Format text as Markdown code, also inside a table."""
    if not text:
        return ""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
