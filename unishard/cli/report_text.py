"""A translation report for people: what needs attention first, then the rest, then one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

from unishard.cli.table import FIT_STYLES
from unishard.cli.wrapping import width_of, wrapped
from unishard.config.describe import bare
from unishard.mapping.rules import Fit
from unishard.printable import in_one_line

if TYPE_CHECKING:
    from unishard.formats import Change, Item, Outcome
    from unishard.formats.filling import Filling

__all__ = ["LOUD", "key_value", "listed", "needs_input", "value_of", "write_text"]

LOUD = (Fit.UNSUPPORTED, Fit.NEEDS_INPUT, Fit.APPROXIMATE)
"""What needs attention, the most important first."""
_ORDER = (*LOUD, Fit.EQUIVALENT, Fit.IGNORED, Fit.EXACT)
_LONGEST = 60
_RANKS = "--world-size"


class _Line(NamedTuple):
    """A line, and how it stands out on a terminal."""

    text: str
    indent: int = 0
    style: str = ""


def write_text(outcome: Outcome, file: TextIO, *, full: bool) -> None:
    """Write the report to a stream: wrapped and with emphasis on a terminal, elsewhere one line for each line.

    Args:
        outcome: A translation.
        file: The stream.
        full: Whether to list what is exact, and all defaults of the tool.
    """
    lines = [line._replace(text=in_one_line(line.text)) for line in _lines(outcome, full=full)]
    if not file.isatty():
        file.writelines(f"{' ' * line.indent}{line.text}\n" for line in lines)
        return
    from rich.console import Console
    from rich.text import Text

    width = width_of(file)
    console = Console(file=file, width=width)
    for line in lines:
        start, hanging = " " * line.indent, " " * (line.indent + 2)
        console.print(Text(wrapped(start + line.text, width, hanging=hanging), style=line.style), soft_wrap=True)


def listed(outcome: Outcome, *, full: bool = False) -> list[Item]:
    """The keys of the file, and the defaults of the tool that need attention, or all of them; the most important first."""
    repeated = [] if full else _repeated(outcome)
    shown = [item for item in outcome.items if full or not item.assumed or item.notable or item.fit in LOUD or item.beside]
    shown = [item for item in shown if not any(item is other for other in repeated)]
    return sorted(shown, key=lambda item: _ORDER.index(item.fit))


def _repeated(outcome: Outcome) -> list[Item]:
    """Keys such as `auto` of which what was read beside the document has a line that also says the value."""
    pairs = [pair for pair in zip(outcome.items, outcome.reading.entries, strict=False) if pair[0].place]
    said = {field for item, entry in pairs if item.beside for field in entry.meaning.fields}
    return [item for item, entry in pairs if not item.beside and entry.meaning.fields and said.issuperset(entry.meaning.fields)]


def value_of(value: object) -> str:
    """Format a value on one short line."""
    text = bare(value)
    if not text.isprintable() or not text:
        text = repr(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def key_value(item: Item) -> str:
    """A key as in the file."""
    return f"{item.key} = {value_of(item.value)}"


def needs_input(outcome: Outcome) -> dict[str, str]:
    """Fields that need input, and where each value comes from."""
    return {path: undecided.who for path, undecided in outcome.reading.undecided.items()}


def _lines(outcome: Outcome, *, full: bool) -> Iterator[_Line]:
    for warning in outcome.warnings:
        yield _Line(f"warning: {warning}")
    items = listed(outcome, full=full)
    for fit in _ORDER:
        here = [item for item in items if item.fit is fit and (full or fit is not Fit.EXACT or (item.assumed and not item.place))]
        if here:
            yield _Line(f"{fit}:", style=FIT_STYLES[fit])
        for item in here:
            yield from _item(item, outcome)
    yield from _changes(outcome)
    if outcome.filling:
        yield from _filled(outcome.filling, [] if full else items, outcome)
    for one in outcome.dropped:
        yield _Line(f"dropped: {one.key} = {value_of(one.value)}{f' (line {one.line})' if one.line else ''}")
    if open_ := needs_input(outcome):
        yield _Line(f"needs input: {' '.join(f'--set {path}=VALUE' for path in open_)}", style=FIT_STYLES[Fit.NEEDS_INPUT])
    if outcome.launch:
        yield _Line(f"launch: {outcome.launch}")
    yield _Line(_sentence(outcome, items, full=full), style="bold")


def _changes(outcome: Outcome) -> Iterator[_Line]:
    """What the translation means otherwise though no key says so: first what the source does, then what its training script decides."""
    source, to = outcome.reading.format, outcome.to
    said = [change for change in outcome.changes if change.said]
    if said:
        yield _Line("changes (no key of the file says it):", style=FIT_STYLES[Fit.APPROXIMATE])
    for change in said:
        yield _Line(f"{change.field}: {_before(change)} -> {value_of(change.after)}  ({change.note})", 2)
    if left := [f"{change.field} = {value_of(change.after)}" for change in outcome.changes if not change.said]:
        yield _Line(f"left to the training script by {source}, decided by {to} unless you set it:", style=FIT_STYLES[Fit.NEEDS_INPUT])
        yield _Line(", ".join(left), 2)


def _before(change: Change) -> str:
    return "what the script does" if change.before is None else value_of(change.before)


def _filled(filling: Filling, items: Sequence[Item], outcome: Outcome) -> Iterator[_Line]:
    """What was read beside the document, and where each value stands."""
    found = [item for item in items if item.place and item.fit is Fit.EXACT]
    if found:
        yield _Line("filled in:", style="bold")
    for item in found:
        yield from _item(item._replace(note=""), outcome)
    if not filling.whose and needs_input(outcome):
        yield _Line(f"{filling.name} is not known to be TrainingArguments, so their defaults fill nothing")
    if filling.unknown:
        yield _Line(f"not understood in {filling.name}: {', '.join(filling.unknown)}")


def _item(item: Item, outcome: Outcome) -> Iterator[_Line]:
    becomes = f" -> {item.becomes}" if item.becomes and item.fit is not Fit.UNSUPPORTED else ""
    yield _Line(f"{key_value(item)}{becomes}  ({_where(item, outcome)})", 2)
    if item.note:
        yield _Line(item.note, 4, FIT_STYLES[item.fit] if item.fit in LOUD else "dim")


def _where(item: Item, outcome: Outcome) -> str:
    if item.beside:
        return item.place
    return f"{_in_file(item, outcome)}, from {item.place}" if item.place else _in_file(item, outcome)


def _in_file(item: Item, outcome: Outcome) -> str:
    if item.assumed:
        return f"default of {outcome.reading.format}"
    name = outcome.reading.source.name
    return f"{name}:{item.line}" if item.line else name or "given"


def _sentence(outcome: Outcome, items: Sequence[Item], *, full: bool) -> str:
    """How many keys of the file are carried over, and what became of the others."""
    written = [item for item in outcome.items if not item.assumed and not item.beside]
    counts = {fit: sum(item.fit is fit for item in written) for fit in Fit}
    ranks = sum(item.fit is Fit.NEEDS_INPUT and _RANKS in item.note for item in written)
    parts = [
        f"{counts[Fit.EXACT] + counts[Fit.EQUIVALENT]} of {len(written)} keys carried over",
        *(f"{counts[fit]} {fit}" for fit in (Fit.APPROXIMATE, Fit.UNSUPPORTED, Fit.IGNORED) if counts[fit]),
        *([f"{_count(changed)} of the training"] if (changed := sum(change.said for change in outcome.changes)) else []),
        *([f"{_need(ranks)} {_RANKS}"] if ranks else []),
        *([f"{_need(counts[Fit.NEEDS_INPUT] - ranks)} input"] if counts[Fit.NEEDS_INPUT] > ranks else []),
    ]
    defaults = sum(item.assumed and not item.beside and item.fit in LOUD for item in outcome.items)
    if defaults:
        whose = f"default{'' if defaults == 1 else 's'} of {outcome.reading.format}"
        parts.append(f"{defaults} {whose} {'needs' if defaults == 1 else 'need'} attention")
    hidden = len(outcome.items) - len(items) + counts[Fit.EXACT]
    more = "" if full or not hidden else " (--report full lists all)"
    return f"{outcome.reading.format} -> {outcome.to}: {'; '.join(parts)}{more}"


def _count(changes: int) -> str:
    return "1 change" if changes == 1 else f"{changes} changes"


def _need(count: int) -> str:
    return f"{count} needs" if count == 1 else f"{count} need"
