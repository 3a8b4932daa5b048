"""Accepted spellings of a field's values, for editors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class Spellings:
    """Marks a field whose values are case-insensitive, and the aliases that its validator accepts.

    It only changes the JSON Schema: an editor offers the canonical values and does not flag an accepted alias.
    """

    aliases: tuple[str, ...] = ()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        words = handler(schema)
        return {"anyOf": [words, {"type": "string", "pattern": in_any_case((*words["enum"], *self.aliases))}]}


def pair(value: Any) -> Any:
    """Two values, which YAML and JSON give as a list."""
    return tuple(value) if isinstance(value, list) else value


def lower(value: Any) -> Any:
    """A word in lower case; anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def in_any_case(words: Iterable[str]) -> str:
    """A pattern for any of these words, in any case."""
    return f"^({'|'.join(map(_any_case, words))})$"


def _any_case(name: str) -> str:
    """A case-insensitive pattern for a word; JSON Schema has no flag for it."""
    return "".join(f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else f"[{letter}]" for letter in name)
