"""docs/formats.md: the keys of each tool, and how each tool expresses a field."""

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

_TOP = """\
# Configs of other tools, key by key

For each tool: what its keys mean in a unishard config, and how it expresses each field of a unishard config.
`unishard translate` reads with the first kind of table and writes with the second; there is no code for single pairs of formats.
[translate.md](translate.md) shows how to use it.

- **exact**: it means the same.
- **equivalent**: same maths to rounding; other collectives or memory, or unishard's loop does it around the engine.
- **approximate**: same purpose, another trade-off; the note says how it differs. An error under `--strict`.
- **ignored**: omitted without effect on training: a launcher, logging, speed or memory setting, or one that is off.
- **needs input**: needs your input: only the training script has the value or can do it; omitted if you give none.
- **unsupported**: no equivalent; the note gives the reason and the alternative.

Verdicts are for the usual case; the report of a translation shows the fit for the actual value. "If absent" is the tool's default
where it differs from unishard's and must be written out. A row that begins with "if" is an exception to the row above it.
"""
_HANDED_ON = "Keys that it passes to an engine are listed under that engine's arguments."
_WRAPPED = "What a training script without unishard passes to the engine, and what the formats above wrap."


def formats() -> list[Format]:
    """The formats of other tools."""
    return [format_ for format_ in map(catalog.get, catalog.NAMES) if format_.keys or format_.rules]


def overview() -> str:
    """A table with the usual fits of each section's keys and fields."""
    rows = [
        (
            f"[{section.title}](docs/formats.md#{_anchor(section.title)})",
            section.tool,
            _counts(row.fit for row in section.keys.values()),
            _counts(row.fit for row in section.rules.values()),
        )
        for section in _sections()
    ]
    return table(("Format", "Tool", "Its keys", "The config's fields in it"), rows)


def _counts(fits: Iterable[Fit]) -> str:
    found = Counter(fits)
    return ", ".join(f"{found[fit]} {fit}" for fit in Fit if found[fit])


def _sections() -> list[_Section]:
    own = [
        _Section(format_.name, format_.tool, format_.keys, format_.rules, f"As read by {format_.tool}. {_HANDED_ON}")
        for format_ in formats()
    ]
    engines = [
        _Section(f"Arguments of {name}", name, each.keys, each.rules, _WRAPPED)
        for name in registry.available(registry.ARGUMENTS)
        for each in (registry.arguments(name),)
    ]
    return own + engines


def formats_page() -> str:
    """The page, with a section for each format and for each engine's arguments."""
    sections = _sections()
    contents = "\n".join(f"- {_links(section)}" for section in sections)
    parts = [
        generated("the tables of the formats and of the backends"),
        _TOP.rstrip(),
        "## Contents",
        contents,
        *(part for section in sections for part in _parts(section)),
    ]
    return "\n\n".join(parts) + "\n"


class _Section(NamedTuple):
    """A format, or an engine's own arguments."""

    title: str
    tool: str
    keys: Mapping[str, Key]
    rules: Mapping[str, Rule]
    what: str

    @property
    def tables(self) -> list[tuple[str, str]]:
        """Its tables with their headings."""
        keys = table(("Key", "Decides", "Fit", "If absent", "Note"), _keys(self.keys))
        fields = table(("Field", "Fit", "Written as", "Note"), _fields(self.rules))
        found = ((self.keys, "what its keys mean", keys), (self.rules, "how it writes each field", fields))
        return [(f"{self.title}: {what}", rows) for there, what, rows in found if there]


def _parts(section: _Section) -> Iterator[str]:
    yield f"## {section.title}"
    yield section.what
    for heading, rows in section.tables:
        yield f"### {heading}"
        yield rows


def _links(section: _Section) -> str:
    inner = ", ".join(f"[{heading.rpartition(': ')[2]}](#{_anchor(heading)})" for heading, _ in section.tables)
    return f"[{section.title}](#{_anchor(section.title)}): {inner}"


def _anchor(heading: str) -> str:
    """GitHub's anchor for a heading."""
    return heading.lower().replace(":", "").replace(" ", "-")


def _keys(keys: Mapping[str, Key]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each key; keys with equal cells share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, key in keys.items():
        silent = "" if key.tool_default is NOTHING else code(key.tool_default)
        alike.setdefault((key.fields, f"**{key.fit}**", silent, key.note), []).append(f"`{name}`")
    for (fields, fit, silent, note), names in alike.items():
        yield ", ".join(names), ", ".join(f"`{field}`" for field in fields.split(", ") if field), fit, silent, note


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
