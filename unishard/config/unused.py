"""Fields that decide nothing under a config, by the marks of the schema.

The sections refuse most of them if a file sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from pydantic.fields import FieldInfo

from unishard.config import Config, Section, leaves, value_at
from unishard.config.relevance import OffAt, UnusedIf


def why_unused(cfg: Config, path: str) -> str | None:
    """Why a field decides nothing under a config; empty where its own value says so, None where it decides."""
    for mark in _marks()[path]:
        if isinstance(mark, OffAt):
            if value_at(cfg, path) == mark.value:
                return ""
        elif mark.holds(cfg):
            return mark.why
    return None


@cache
def _marks() -> Mapping[str, tuple[OffAt | UnusedIf, ...]]:
    """The marks of each field in the order in which they count, by its path."""
    sections = {"": Config} | dict(_sections())
    return {path: tuple(_marks_of(field, sections[path.rpartition(".")[0]])) for path, field in leaves(Config)}


def _marks_of(field: FieldInfo, section: type[Section]) -> Iterator[OffAt | UnusedIf]:
    off = [mark for mark in field.metadata if isinstance(mark, OffAt)]
    if not off:
        yield from section.unused_if
    yield from (mark for mark in field.metadata if isinstance(mark, UnusedIf))
    yield from off


def _sections(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield prefix + name, field.annotation
            yield from _sections(field.annotation, f"{prefix}{name}.")
