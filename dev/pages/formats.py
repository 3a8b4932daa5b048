"""docs/formats.md and a page for each tool in docs/formats/: its keys, and how it expresses each field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dev.pages.markdown import code, generated, table
from unishard.config import Config, leaves
from unishard.contract import registry
from unishard.contract.entries import NOTHING, Key
from unishard.contract.render import FieldResult
from unishard.contract.rules import Fit, Rule
from unishard.formats import catalog
from unishard.formats.format import Format

FOLDER = "docs/formats"
_SOURCE = "the tables of the formats and of the backends"
_TOP = """\
# Configs of other tools, key by key

`unishard translate` reads and writes {written}, and only reads {read}; [translate.md](translate.md) shows how to use it.
Each tool has a page with two tables: what its keys mean in a unishard config, and how it expresses each field of a unishard config.
A translation reads with the first kind of table and writes with the second. What no field says stands beside the tables, by tool and not by pair: how a save holds the weights, and arguments that several tools hand to Trainer.

- **exact**: it means the same.
- **equivalent**: same maths to rounding; other collectives or memory, or unishard's loop does it around the engine.
- **approximate**: same purpose, another trade-off; the note says how it differs. An error under `--strict`.
- **ignored**: omitted without effect on training: a launcher, logging, speed or memory setting, or one that is off.
- **needs input**: needs your input: only the training script has the value or can do it; omitted if you give none.
- **unsupported**: no equivalent; the note gives the reason and the alternative.

Verdicts are for the usual case; the report of a translation shows the fit for the actual value. "If absent" is the tool's default
where it differs from unishard's and must be written out. A row that begins with "if" is an exception to the row above it.
A field that is off, or that something else switches off, fits everywhere; the tables leave that case out.

## The tools

How many keys and fields have which fit. Keys that a format passes to an engine are counted under that engine's arguments.
"""
_HANDED_ON = "Keys that it passes to an engine are listed under that engine's arguments."
_WRAPPED = "What a training script without unishard passes to the engine, and what the formats of other tools wrap."


def formats() -> list[Format]:
    """The formats of other tools."""
    return [format_ for format_ in map(catalog.get, catalog.NAMES) if format_.keys or format_.rules]


def format_pages() -> dict[str, str]:
    """The list of tools, and the page of each, by their paths in the checkout."""
    tools = _tools()
    return {f"{FOLDER}.md": _list(tools)} | {f"{FOLDER}/{tool.name}.md": _page(tool) for tool in tools}


class _Tool(NamedTuple):
    """A format, or an engine's own arguments."""

    name: str
    title: str
    about: str
    keys: Mapping[str, Key]
    rules: Mapping[str, Rule]


def _tools() -> list[_Tool]:
    tools = [
        _Tool(format_.name, format_.tool, f"As read by {format_.tool}. {_HANDED_ON}", format_.keys, format_.rules)
        for format_ in formats()
    ]
    engines = [
        _Tool(name, f"Arguments of {name}", _WRAPPED, arguments.keys, arguments.rules)
        for name in registry.available(registry.ARGUMENTS)
        for arguments in (registry.arguments(name),)
    ]
    return tools + engines


def _list(tools: Iterable[_Tool]) -> str:
    rows = [
        (
            f"[{tool.name}](formats/{tool.name}.md)",
            tool.title,
            _counts(key.fit for key in tool.keys.values()),
            _counts(rule.fit for rule in tool.rules.values()),
        )
        for tool in tools
    ]
    written = catalog.writable()
    read = _listed(name for name in catalog.NAMES if name not in written)
    top = _TOP.format(written=_listed(written), read=read).rstrip()
    header = ("Page", "Tool", "Its keys", "The config's fields in it")
    return "\n\n".join([generated(_SOURCE), top, table(header, rows)]) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _counts(fits: Iterable[Fit]) -> str:
    counts = Counter(fits)
    return ", ".join(f"{counts[fit]} {fit}" for fit in Fit if counts[fit])


def _page(tool: _Tool) -> str:
    parts = [generated(_SOURCE), f"# {tool.title}", f"{tool.about} [formats.md](../formats.md) explains the fits."]
    if tool.keys:
        parts += ["## What its keys mean", table(("Key", "Decides", "Fit", "If absent", "Note"), _keys(tool.keys))]
    if tool.rules:
        parts += ["## How it writes each field", table(("Field", "Fit", "Written as", "Note"), _fields(tool.rules))]
    return "\n\n".join(parts) + "\n"


def _keys(keys: Mapping[str, Key]) -> Iterator[tuple[str, ...]]:
    for name, key in sorted(keys.items()):
        silent = "" if key.tool_default is NOTHING else code(key.tool_default)
        yield f"`{name}`", ", ".join(f"`{field}`" for field in key.fields), f"**{key.fit}**", silent, key.note


def _fields(rules: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    for path, _ in leaves(Config):
        if path not in rules:
            continue
        row = rules[path]
        yield f"`{path}`", *_said(FieldResult(row.fit, row.key, row.note))
        for case in row.when:
            yield "", *_said(FieldResult(case.fit, f"if {case.case}", case.note))


def _said(word: FieldResult) -> tuple[str, str, str]:
    return f"**{Fit(word.fit)}**", word.key, word.note
