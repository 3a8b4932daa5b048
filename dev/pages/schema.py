"""docs/schema.md: each field of the config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from dev.pages.markdown import code, generated, table
from unishard.config import Config, Section, items_of
from unishard.config.describe import bare, expected

_TOP = """\
# The config, field by field

A config is a YAML 1.2 file. Every field has a default, unknown fields are errors, and variables are not expanded.
[MAPPING.md](../MAPPING.md) shows what each field becomes on each engine; `unishard explain` shows it for one config.
"""


def schema() -> str:
    """docs/schema.md: type, default and description of every field."""
    parts = [generated("the schema"), _TOP.rstrip(), "## top level", _fields(Config), *_sections(Config)]
    return "\n\n".join(parts) + "\n"


def _sections(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The sections in a section, each before those in it."""
    for name, field in section.model_fields.items():
        kind, path = field.annotation, prefix + name
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from (f"## {path}", inspect.getdoc(kind) or "", *_shorthand(path, kind), _fields(kind, f"{path}."))
            yield from _sections(kind, f"{path}.")
        elif item := items_of(kind):
            yield from (f"### {path}", f"Each section of the list. {inspect.getdoc(item)}", _fields(item))


def _shorthand(name: str, kind: type[Section]) -> Iterator[str]:
    if kind.shorthand:
        usual = kind.model_fields[kind.shorthand[0]].default
        value = f"<{kind.shorthand[0]}>" if usual is None else bare(usual)
        fields = ", ".join(f"{field}: {value}" for field in kind.shorthand)
        yield f"Short form: `{name}: {value}` means `{name}: {{{fields}}}`."


def _fields(section: type[Section], prefix: str = "") -> str:
    rows, described = [], section.descriptions()
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows.append(
                (f"`{name}`", "section", "", f"{described[name]} See [{prefix}{name}](#{_anchor(prefix + name)}).")
            )
        else:
            rows.append((f"`{name}`", expected(field), _default(section, name, field), described[name]))
    return table(("Field", "Type", "Default", "Description"), rows)


def _anchor(heading: str) -> str:
    return heading.replace(".", "")


def _default(section: type[Section], name: str, field: FieldInfo) -> str:
    if field.default_factory_takes_validated_data:  # it depends on the fields before it
        return code(getattr(section(), name))
    return code(field.get_default(call_default_factory=True))
