"""Write a translation report: a table on a terminal, aligned text in a pipe, JSON, or Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO, cast

from unishard.cli.table import FIT_STYLES, fitting, is_narrow, show, show_blocks
from unishard.cli.wrapping import Prose, width_of
from unishard.config.describe import bare
from unishard.mapping.rules import Fit

if TYPE_CHECKING:
    from rich.text import Text

    from unishard.formats import Item, Outcome

__all__ = ["ReportForm", "plain", "value_of", "write_report"]

_ORDER = (Fit.EXACT, Fit.EQUIVALENT, Fit.IGNORED, Fit.APPROXIMATE, Fit.NEEDS_INPUT, Fit.UNSUPPORTED)
"""What needs attention comes last, next to the prompt."""
_LOUD = frozenset({Fit.APPROXIMATE, Fit.NEEDS_INPUT, Fit.UNSUPPORTED})
_LONGEST = 60


class ReportForm(StrEnum):
    """Form of the report."""

    TEXT = "text"
    """Each key of the file, and those tool defaults that need attention."""
    FULL = "full"
    """Also all tool defaults."""
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
            file.write(_markdown(outcome))
        case ReportForm.TEXT | ReportForm.FULL:
            _write_text(outcome, form, cast("TextIO", Prose(file)))


def _sorted(outcome: Outcome, *, full: bool) -> list[Item]:
    shown = [item for item in outcome.items if full or not item.assumed or item.notable or item.fit in _LOUD]
    return sorted(shown, key=lambda item: _ORDER.index(item.fit))


def _counts_of(items: Sequence[Item]) -> str:
    """Count the fits: `4 exact, 1 unsupported`."""
    counts = [(fit, sum(item.fit is fit for item in items)) for fit in _ORDER]
    return ", ".join(f"{count} {fit}" for fit, count in counts if count) or "no keys"


def value_of(value: Any) -> str:
    """Format a value on one short line."""
    text = bare(value)
    if not text.isprintable() or not text:
        text = repr(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _key_value(item: Item) -> str:
    return f"{item.key} = {value_of(item.value)}"


def _where(item: Item, outcome: Outcome) -> str:
    if item.assumed:
        return "assumed"
    name = outcome.reading.source.name
    return f"{name}:{item.line}" if item.line else name or "given"


def _write_text(outcome: Outcome, form: ReportForm, file: TextIO) -> None:
    for warning in outcome.warnings:
        file.write(f"warning: {warning}\n")
    items = _sorted(outcome, full=form is ReportForm.FULL)
    if not items:
        pass
    elif not file.isatty():
        columns = ("where", "key = value", "fit", "becomes", "note")
        rows = [(_where(item, outcome), _key_value(item), str(item.fit), item.becomes, item.note) for item in items]
        show(columns, rows, file)
    elif is_narrow(3, file) or (widths := fitting(_rows(outcome, items), file)) is None:
        show_blocks(((f"{_key_value(item)}  ({_where(item, outcome)})", _lines(item, outcome.to)) for item in items), file)
    else:
        _draw(outcome, items, widths, file)
    for one in outcome.dropped:
        file.write(f"dropped: {one.key} = {value_of(one.value)}{f' (line {one.line})' if one.line else ''}\n")
    for line in _closing(outcome, len(outcome.items) - len(items)):
        file.write(f"{line}\n")


def _lines(item: Item, to: str) -> list[tuple[str, str]]:
    becomes = f"{item.fit}: {item.becomes}" if item.becomes else str(item.fit)
    return [(to, becomes), *([("", item.note)] if item.note else [])]


def _rows(outcome: Outcome, items: Sequence[Item]) -> list[tuple[str, str, str, str]]:
    """The cells of the table that is drawn, without styles."""
    rows = [("" if item.line is None else str(item.line), _key_value(item), str(item.fit), _becomes(item).plain) for item in items]
    return [("line", outcome.reading.format, "fit", outcome.to), *rows]


def _draw(outcome: Outcome, items: Sequence[Item], widths: Sequence[int], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold")
    table.add_column("line", justify="right", style="dim", width=widths[0])
    table.add_column(outcome.reading.format, width=widths[1])
    table.add_column("fit", width=widths[2])
    table.add_column(outcome.to, width=widths[3])
    for item in items:
        style = FIT_STYLES[item.fit]
        line = "" if item.line is None else str(item.line)
        table.add_row(line, _text(_key_value(item), "dim" if item.assumed else ""), _text(str(item.fit), style), _becomes(item))
    Console(file=file, width=width_of(file)).print(table)


def _text(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style, overflow="fold")


def _becomes(item: Item) -> Text:
    """The translated key, with the note below."""
    cell = _text(item.becomes, "")
    if item.note:
        cell.append("\n" if item.becomes else "")
        cell.append(item.note, style=FIT_STYLES[item.fit] if item.fit in _LOUD else "dim")
    return cell


def _needs_input(outcome: Outcome) -> dict[str, str]:
    """Fields that need input, and where each value comes from."""
    return {path: undecided.who for path, undecided in outcome.reading.undecided.items()}


def _closing(outcome: Outcome, hidden: int) -> list[str]:
    """The last lines: the fields that need input, and the counts."""
    open_ = _needs_input(outcome)
    lines = [f"needs input: {' '.join(f'--set {path}=VALUE' for path in open_)}"] if open_ else []
    lines += [f"launch: {outcome.launch}"] if outcome.launch else []
    more = f" (--report full adds {hidden} defaults of {outcome.reading.format})" if hidden else ""
    return [*lines, f"{outcome.reading.format} -> {outcome.to}: {_counts_of(outcome.items)}{more}"]


def _object(outcome: Outcome) -> dict[str, Any]:
    fields = ("key", "value", "fit", "becomes", "note", "line", "assumed")
    return {
        "file": outcome.reading.source.name,
        "from": outcome.reading.format,
        "to": outcome.to,
        "backend": outcome.reading.config.backend,
        "summary": {str(fit): len(outcome.of(fit)) for fit in _ORDER},
        "needs_input": _needs_input(outcome),
        "launch": outcome.launch,
        "warnings": list(outcome.warnings),
        "dropped": [{"key": one.key, "value": plain(one.value), "line": one.line} for one in outcome.dropped],
        "items": [{name: plain(getattr(item, name)) for name in fields} for item in outcome.items],
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
    for item in _sorted(outcome, full=False):
        fit = f"**{item.fit}**" if item.fit in _LOUD else str(item.fit)
        line = "" if item.line is None else str(item.line)
        cells = (line, _code(_key_value(item)), fit, _code(item.becomes), _escaped(item.note))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- `{path}` comes from {_escaped(who)}: `--set {path}=VALUE`" for path, who in _needs_input(outcome).items())]
    lines += [f"- dropped: {_code(f'{one.key} = {value_of(one.value)}')}" for one in outcome.dropped]
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
