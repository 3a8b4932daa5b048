"""docs/formats.md: what each key of another tool's config means, and how each tool says a field. From the tables that translate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from unishard.config import Config, leaves
from unishard.formats import catalog
from unishard.formats.format import Format
from unishard.mapping.entries import NOTHING, Key
from unishard.mapping.express import FieldResult
from unishard.mapping.rules import Fit, Rule
from unishard.plugins.backend import Backend
from unishard.reference.markdown import code, table

__all__ = ["formats", "formats_page", "overview"]

_TOP = """\
# Configs of other tools, key by key

What each key of another tool's config means in the words of a unishard config, and how that tool says each field of it.
`unishard translate` reads with the first kind of table and writes with the second; no pair of formats has code of its own.
[translate.md](translate.md) shows how to use it.

- **exact**: it means the same there.
- **equivalent**: same maths to rounding; other collectives or memory, or unishard's loop does it around the engine.
- **approximate**: same purpose, another trade-off; the note says how it differs. An error under `--strict`.
- **ignored**: left out, and nothing is lost: it concerns a launcher, a log, time or memory alone, or is off.
- **needs input**: needs your decision: only the training script knows it, or must do it; where nothing says it, it is left out.
- **unsupported**: cannot be had; the note says why, and what instead.

A fit is that of the usual case; a value can fare worse or better, and the report of a translation says so. "if absent" is the value
that the tool assumes where its config is silent and that must be said to keep its meaning. A row that begins with "if" is an exception to
the row above it.
"""
_HANDED_ON = "Keys that it hands on to an engine stand in the section of that engine's arguments."
_WRAPPED = "What a training script without unishard hands to the engine, and what the formats above wrap."


def formats() -> list[Format]:
    """Those that describe another tool's files."""
    return [format_ for format_ in map(catalog.get, catalog.NAMES) if format_.keys or format_.expressions]


def overview(backends: Sequence[Backend]) -> str:
    """A table with a row for each section of the page: how many keys and fields come to which fit as a rule."""
    rows = [
        (
            f"[{section.title}](docs/formats.md#{_anchor(section.title)})",
            section.tool,
            _counts(row.fit for row in section.keys.values()),
            _counts(row.fit for row in section.expressions.values()),
        )
        for section in _sections(backends)
    ]
    return table(("Format", "Tool", "Its keys", "How it says the config's fields"), rows)


def _counts(fits: Iterable[Fit]) -> str:
    found = Counter(fits)
    return ", ".join(f"{found[fit]} {fit}" for fit in Fit if found[fit])


def _sections(backends: Sequence[Backend]) -> list[_Section]:
    own = [
        _Section(format_.name, format_.tool, format_.keys, format_.expressions, f"As {format_.tool} reads it. {_HANDED_ON}")
        for format_ in formats()
    ]
    return own + [
        _Section(f"Arguments of {backend.name}", backend.name, backend.keys, backend.expressions, _WRAPPED) for backend in backends
    ]


def formats_page(backends: Sequence[Backend], generated: str) -> str:
    """The page, with a section for each format and one for each engine's own arguments."""
    sections = _sections(backends)
    contents = "\n".join(f"- {_links(section)}" for section in sections)
    parts = [generated, _TOP.rstrip(), "## Contents", contents, *(part for section in sections for part in _parts(section))]
    return "\n\n".join(parts) + "\n"


class _Section(NamedTuple):
    """A format, or an engine's own arguments."""

    title: str
    tool: str
    keys: Mapping[str, Key]
    expressions: Mapping[str, Rule]
    what: str

    @property
    def tables(self) -> list[tuple[str, str]]:
        """Those that it has, each with its heading."""
        keys = table(("Key", "Decides", "Fit", "If absent", "Note"), _keys(self.keys))
        fields = table(("Field", "Fit", "Said by", "Note"), _fields(self.expressions))
        found = ((self.keys, "what its keys mean", keys), (self.expressions, "how it says each field", fields))
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
    """What GitHub makes of a heading."""
    return heading.lower().replace(":", "").replace(" ", "-")


def _keys(keys: Mapping[str, Key]) -> Iterator[tuple[str, ...]]:
    """A row for each key; keys of which the same is to be said share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, key in keys.items():
        silent = "" if key.silent is NOTHING else code(key.silent)
        alike.setdefault((key.fields, f"**{key.fit}**", silent, key.note), []).append(f"`{name}`")
    for (fields, fit, silent, note), names in alike.items():
        yield ", ".join(names), ", ".join(f"`{field}`" for field in fields.split(", ") if field), fit, silent, note


def _fields(expressions: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    for path, _ in leaves(Config):
        if path not in expressions:
            continue
        row = expressions[path]
        yield f"`{path}`", *_said(FieldResult(row.fit, row.key, row.note))
        for case in row.when:
            yield "", *_said(FieldResult(case.fit, f"if {case.case}", case.note))


def _said(word: FieldResult) -> tuple[str, str, str]:
    return f"**{Fit(word.fit)}**", word.key, word.note
