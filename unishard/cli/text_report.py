"""A translation report for people: what needs attention first, then the rest, then one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from unishard.cli.tables import FIT_STYLES
from unishard.cli.wrapping import report_width, shell_lines, width_of, wrapped
from unishard.config.describe import bare
from unishard.contract.entries import Undecided
from unishard.contract.rules import Fit
from unishard.errors import in_one_line

if TYPE_CHECKING:
    from unishard.contract.entries import Entry
    from unishard.formats import Item, Outcome
    from unishard.formats.beside.supplied import Supplied
    from unishard.formats.report.comparing import FieldRow


LOUD = (Fit.UNSUPPORTED, Fit.NEEDS_INPUT, Fit.APPROXIMATE)
"""What needs attention, the most important first."""
_LOUD_FIRST = (*LOUD, Fit.EQUIVALENT, Fit.IGNORED, Fit.EXACT)
BY_SCRIPT = "for your training script"
_LONGEST = 60
_RANKS = "--world-size"
_HANGING = {0: 4, 2: 6, 4: 4}
"""How far the continuations of a line are indented, by its own indent: those of a key farther than the note below
it."""


class _Line(NamedTuple):
    """A line, and how it stands out on a terminal."""

    text: str
    indent: int = 0
    style: str = ""
    whole: bool = False
    """Whether it is a command, which stays on one line."""


def write_text(outcome: Outcome, file: TextIO, *, full: bool) -> None:
    """Write the report to a stream, with emphasis on a terminal.

    Args:
        outcome: A translation.
        file: The stream.
        full: Whether to list what is exact, and all defaults of the tool.
    """
    width = report_width(file)
    lines = [(_laid_out(line, width), line.style) for line in _lines(outcome, full=full)]
    if not file.isatty():
        file.writelines(f"{text}\n" for text, _ in lines)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, width=width_of(file))
    for text, style in lines:
        console.print(Text(text, style=style), soft_wrap=True)


def _laid_out(line: _Line, width: int) -> str:
    text = " " * line.indent + in_one_line(line.text)
    return text if line.whole else wrapped(text, width, hanging=" " * _HANGING[line.indent])


def listed(outcome: Outcome, *, full: bool = False) -> list[Item]:
    """The keys of the file, and the defaults of the tool that need attention, or all of them; the most important
    first.
    """
    repeated = [] if full else _repeated(outcome)
    shown = [
        item for item in outcome.items if full or not item.assumed or item.notable or item.fit in LOUD or item.supplied
    ]
    shown = [item for item in shown if not any(item is other for other in repeated)]
    return sorted(shown, key=lambda item: _LOUD_FIRST.index(item.fit))


def _repeated(outcome: Outcome) -> list[Item]:
    """Keys such as `auto` whose value a line for another file, read beside the document, also says."""
    placed = [item for item in outcome.items if item.place]
    covered = {field for item in placed if item.supplied for field in item.entry.effect.fields}
    return [
        item
        for item in placed
        if not item.supplied and item.entry.effect.fields and covered.issuperset(item.entry.effect.fields)
    ]


def value_of(value: object) -> str:
    """Format a value on one short line."""
    text = bare(value)
    if not text.isprintable() or not text:
        text = repr(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def key_value(item: Item | Entry) -> str:
    """A key as in the file."""
    return f"{item.key} = {value_of(item.value)}"


def needs_input(outcome: Outcome) -> dict[str, str]:
    """Fields that need input, and where each value comes from."""
    return {path: undecided.who for path, undecided in outcome.reading.undecided.items()}


def _lines(outcome: Outcome, *, full: bool) -> Iterator[_Line]:
    if names := list(filter(None, (outcome.reading.source.name, outcome.supplied and outcome.supplied.name))):
        yield _Line(", with ".join(names), style="bold")
    for warning in outcome.warnings:
        yield _Line(f"warning: {warning}")
    items = listed(outcome, full=full)
    for fit in _LOUD_FIRST:
        here = [
            item
            for item in items
            if item.fit is fit and (full or fit is not Fit.EXACT or (item.assumed and not item.place))
        ]
        ours = [item for item in here if is_left_to_script(item, outcome)]
        for heading, some in ((fit, [item for item in here if item not in ours]), (BY_SCRIPT, ours)):
            if some:
                yield _Line(f"{heading}:", style=FIT_STYLES[fit])
            yield from _noted(some, outcome)
    yield from _changes(outcome)
    if outcome.supplied:
        yield from _filled(outcome.supplied, [] if full else items, outcome)
    yield from _dropped(outcome)
    if open_ := needs_input(outcome):
        yield _Line(
            f"needs input: {' '.join(f'--set {path}=VALUE' for path in open_)}", style=FIT_STYLES[Fit.NEEDS_INPUT]
        )
    yield from _launched(outcome.launch)
    yield _Line(_sentence(outcome, items, full=full), style="bold")


def set_by(item: Item, outcome: Outcome) -> list[str]:
    """The overrides of fields that a key says."""
    return [text for text in outcome.overrides if text.partition("=")[0].strip() in item.entry.effect.fields]


def is_left_to_script(item: Item, outcome: Outcome) -> bool:
    """Whether the training script must say what an override has decided."""
    return item.fit is Fit.NEEDS_INPUT and item.by_script and bool(set_by(item, outcome))


def _launched(command: str) -> Iterator[_Line]:
    """The line that starts the processes, to paste."""
    line, _, where = command.partition("  # ")
    if line:
        yield _Line(f"launch{where and f' {where}'}:")
        yield from (_Line(part, whole=True) for part in shell_lines(line.split()).split("\n"))


def _noted(items: Sequence[Item], outcome: Outcome) -> Iterator[_Line]:
    """The keys, those with the same note together above it; last those that need none."""
    notes = dict.fromkeys(sorted((item.note for item in items), key=lambda note: not note))
    for note in notes:
        alike = [item for item in items if item.note == note]
        for item in alike:
            yield _item(item, outcome)
        if note:
            yield _Line(note, 4, FIT_STYLES[alike[0].fit] if alike[0].fit in LOUD else "dim")


def _dropped(outcome: Outcome) -> Iterator[_Line]:
    """What was left out, and what that changes in the training."""
    if outcome.dropped:
        yield _Line("dropped:", style="bold")
    for one, after in zip_longest(outcome.dropped, outcome.dropped[1:]):
        yield _Line(f"{one.key}{f':{one.line}' if one.line else ''} = {value_of(one.value)}", 2)
        if one.effect and (after is None or after.effect != one.effect):
            yield _Line(one.effect, 4)


def _changes(outcome: Outcome) -> Iterator[_Line]:
    """Settings that differ after the translation though no key says so: first those of the source, then those that its
    training script decides.
    """
    source, to = outcome.reading.format, outcome.to
    stated = [change for change in outcome.changes if change.before.said]
    left = [change for change in outcome.changes if not change.before.said]
    if stated:
        yield _Line("changes (no key of the file says it):", style=FIT_STYLES[Fit.APPROXIMATE])
    for change in stated:
        yield _Line(f"{change.field}: {_before(change)} -> {value_of(change.after.value)}  ({change.after.origin})", 2)
    if left:
        yield _Line(
            f"left to the training script by {source}, decided by {to} unless you set it:",
            style=FIT_STYLES[Fit.NEEDS_INPUT],
        )
        yield _Line(", ".join(f"{change.field} = {value_of(change.after.value)}" for change in left), 2)


def _before(change: FieldRow) -> str:
    return "what the script does" if change.before.value is None else value_of(change.before.value)


def _filled(supplied: Supplied, items: Sequence[Item], outcome: Outcome) -> Iterator[_Line]:
    """What was read beside the document, and where each value stands."""
    filled = [item for item in items if item.place and item.fit is Fit.EXACT]
    if filled:
        yield _Line("filled in:", style="bold")
    for item in filled:
        yield _item(item, outcome)
    if not supplied.tool and needs_input(outcome):
        yield _Line(f"{supplied.name} is not known to be TrainingArguments, so their defaults fill nothing")
    if supplied.unknown:
        yield _Line(f"not understood in {supplied.name}: {', '.join(supplied.unknown)}")


def _item(item: Item, outcome: Outcome) -> _Line:
    becomes = f" -> {item.becomes}" if item.becomes and item.fit is not Fit.UNSUPPORTED else ""
    line = f":{item.line}" if item.line else ""
    assumed = f"default of {outcome.reading.format}" if item.assumed and not item.supplied else ""
    place = ", from ".join(filter(None, (assumed, _place(item, outcome))))
    where = ", ".join(filter(None, (place, *(f"--set {text}" for text in set_by(item, outcome)))))
    return _Line(f"{item.key}{line} = {value_of(item.value)}{becomes}{where and f'  ({where})'}", 2)


def _place(item: Item, outcome: Outcome) -> str:
    """Where the value stands beside the document; the report begins with the whole path."""
    name = outcome.supplied.name if outcome.supplied else ""
    return item.place.replace(name, Path(name).name) if name else item.place


def _sentence(outcome: Outcome, items: Sequence[Item], *, full: bool) -> str:
    """How many keys of the file are carried over, and what became of the others."""
    written = [item for item in outcome.items if not item.assumed and not item.supplied]
    counts = {fit: sum(item.fit is fit for item in written) for fit in Fit}
    ranks = sum(item.fit is Fit.NEEDS_INPUT and _by_ranks(item) for item in written)
    left = sum(is_left_to_script(item, outcome) for item in written)
    counts[Fit.NEEDS_INPUT] -= left
    parts = [
        f"{counts[Fit.EXACT] + counts[Fit.EQUIVALENT]} of {len(written)} keys carried over",
        *(f"{counts[fit]} {fit}" for fit in (Fit.APPROXIMATE, Fit.UNSUPPORTED, Fit.IGNORED) if counts[fit]),
        *(
            [f"{changed} change{'s' * (changed != 1)} of the training"]
            if (changed := sum(change.before.said for change in outcome.changes))
            else []
        ),
        *([f"{_need(ranks)} {_RANKS}"] if ranks else []),
        *([f"{left} {BY_SCRIPT}"] if left else []),
        *([f"{_need(counts[Fit.NEEDS_INPUT] - ranks)} input"] if counts[Fit.NEEDS_INPUT] > ranks else []),
    ]
    defaults = sum(item.assumed and not item.supplied and item.fit in LOUD for item in outcome.items)
    if defaults:
        whose = f"default{'' if defaults == 1 else 's'} of {outcome.reading.format}"
        parts.append(f"{defaults} {whose} {'needs' if defaults == 1 else 'need'} attention")
    hidden = len(outcome.items) - len(items) + counts[Fit.EXACT]
    more = "" if full or not hidden else " (--report full lists all)"
    return f"{outcome.reading.format} -> {outcome.to}: {'; '.join(parts)}{more}"


def _by_ranks(item: Item) -> bool:
    return any(isinstance(value, Undecided) and value.by_ranks for value in item.entry.effect.fields.values())


def _need(count: int) -> str:
    return f"{count} needs" if count == 1 else f"{count} need"
