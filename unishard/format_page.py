"""docs/formats.md: what each key of another tool's config means, and how each tool says a field. From the tables that translate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from unishard.backend import Backend
from unishard.config import Config, leaves
from unishard.formats import catalog
from unishard.formats.format import Format
from unishard.markdown import code, table
from unishard.meanings import NOTHING, Expression, Key, Verdict, Word

__all__ = ["formats", "formats_page", "links"]

_TOP = """\
# Configs of other tools, key by key

What each key of another tool's config means in the words of a unishard config, and how that tool says each field of it.
`unishard translate` reads with the first kind of table and writes with the second; no pair of formats has code of its own.
[translate.md](translate.md) shows how to use it.

- **exact**: it means the same there.
- **emulated**: same maths to rounding; other collectives or memory, or unishard's loop does it around the engine.
- **approximate**: same purpose, another trade-off; the note says how it differs. An error under `--strict`.
- **dropped**: left out, and nothing is lost: it concerns a launcher, a log, or something that is off.
- **undecided**: needs your decision: only the training script knows it, or must do it.
- **refused**: cannot be had; the note says why, and what instead.

A verdict is that of the usual case; a value can fare worse or better, and the report of a translation says so. "if absent" is the value
that the tool assumes where its config is silent and that must be said to keep its meaning. A row that begins with "if" is an exception to
the row above it.
"""


def formats() -> list[Format]:
    """Those that describe another tool's files."""
    found = [catalog.get(name) for name in catalog.NAMES if find_spec(f"unishard.formats.{name}")]
    return [format_ for format_ in found if format_.keys or format_.expressions]


def links() -> str:
    """The formats and the engines, each with a link to its section."""
    names = [name for name in catalog.NAMES if find_spec(f"unishard.formats.{name}")]
    return ", ".join(f"`{name}`" for name in names)


def formats_page(backends: Sequence[Backend], generated: str) -> str:
    """The page, with a section for each format and one for each engine's own arguments."""
    parts = [generated, _TOP.rstrip()]
    for format_ in formats():
        parts += _section(
            f"{format_.name} ({format_.tool})",
            format_.keys,
            format_.expressions,
            "Keys that it hands on to an engine stand in the section of that engine's arguments.",
        )
    for backend in backends:
        parts += _section(
            f"Arguments of {backend.name}",
            backend.keys,
            backend.expressions,
            "What a training script without unishard hands to the engine, and what the formats above wrap.",
        )
    return "\n\n".join(parts) + "\n"


def _section(title: str, keys: Mapping[str, Key], expressions: Mapping[str, Expression], what: str) -> Iterator[str]:
    yield f"## {title}"
    yield what
    if keys:
        yield table(("Key", "Decides", "Verdict", "If absent", "Note"), _keys(keys))
    if expressions:
        yield table(("Field", "Verdict", "Said by", "Note"), _fields(expressions))


def _keys(keys: Mapping[str, Key]) -> Iterator[tuple[str, ...]]:
    """A row for each key; keys of which the same is to be said share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, key in keys.items():
        silent = "" if key.silent is NOTHING else code(key.silent)
        alike.setdefault((key.fields, f"**{key.verdict}**", silent, key.note), []).append(f"`{name}`")
    for (fields, verdict, silent, note), names in alike.items():
        yield ", ".join(names), ", ".join(f"`{field}`" for field in fields.split(", ") if field), verdict, silent, note


def _fields(expressions: Mapping[str, Expression]) -> Iterator[tuple[str, ...]]:
    for path, _ in leaves(Config):
        if path not in expressions:
            continue
        row = expressions[path]
        yield f"`{path}`", *_said(Word(row.verdict, row.key, row.note))
        for case in row.when:
            yield "", *_said(Word(case.verdict, f"if {case.case}", case.note))


def _said(word: Word) -> tuple[str, str, str]:
    return f"**{Verdict(word.verdict)}**", word.key, word.note
