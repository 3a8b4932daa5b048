"""MAPPING.md: what each field of the config becomes on each backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic.fields import FieldInfo

from dev.pages.markdown import code, generated, table
from unishard.config import Config, leaves
from unishard.config.describe import expected
from unishard.contract.backend import Backend
from unishard.contract.rules import Fit, Rule

_TOP = """\
# What each field becomes

Each field of the config, and what it becomes on each backend. The same rules also translate and report.
[docs/formats.md](docs/formats.md) has the same for the configs of other tools.

How well a backend supports a field:

- **exact**: same maths, same collectives.
- **equivalent**: same maths to rounding; other collectives or memory, or unishard's loop does it around the engine.
- **approximate**: same purpose, another trade-off. Reported by `unishard explain`, and an error under `strict: true`.
- **unsupported**: an error that names the alternative.

A row that begins with "if" is an exception to the row above it. An empty cell in it means that the backend has no exception.
A field that is off, or that something else switches off, fits everywhere; the tables leave that case out.
"unishard's loop" means that no engine setting is involved: the loop around the engine does it, in the same way on each backend.
"""


def mapping(backends: Sequence[Backend]) -> str:
    """MAPPING.md with one column for each backend."""
    parts = [generated("the schema and the backends' rules"), _TOP.rstrip()]
    fields = dict(leaves(Config))
    for section in dict.fromkeys(path.rpartition(".")[0] for path in fields):
        parts.append(f"## {section or 'top level'}")
        rows = [
            row
            for path, field in fields.items()
            if path.rpartition(".")[0] == section
            for row in _rows(path, field, backends)
        ]
        parts.append(table(("Field", "Values", *(backend.name for backend in backends)), rows))
    for backend in backends:
        parts += [
            f"## Always written: {backend.name}",
            "Settings that no field controls. They are always written, so that unishard never relies on the engine's "
            "defaults.",
            table(
                ("Setting", "Value", "Why"),
                ((f"`{key}`", code(value), why) for key, (value, why) in sorted(backend.constants.items())),
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _rows(path: str, field: FieldInfo, backends: Sequence[Backend]) -> Iterator[tuple[str, ...]]:
    rules = [backend.rules[path] for backend in backends]
    yield (f"`{path.rpartition('.')[2]}`", expected(field), *(_cell(rule.fit, rule.note, rule.key) for rule in rules))
    for case in dict.fromkeys(case.case for rule in rules for case in rule.when):
        yield ("", f"if {case}", *(_exception(rule, case) for rule in rules))


def _exception(rule: Rule, case: str) -> str:
    return next((_cell(when.fit, when.note) for when in rule.when if when.case == case), "")


def _cell(fit: Fit, note: str, native: str = "") -> str:
    return "<br>".join(part for part in (f"**{fit}**" + (f" · {native}" if native else ""), note) if part)
