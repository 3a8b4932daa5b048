"""Which spellings of a word a field takes, for editors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

__all__ = ["Spellings"]


@dataclass(frozen=True, slots=True)
class Spellings:
    """Marks a field whose words are taken in any case, and the other words that its validator knows.

    It changes the JSON Schema alone, so that an editor offers the canonical words and underlines none that is accepted.
    """

    aliases: tuple[str, ...] = ()

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        words = handler(schema)
        return {"anyOf": [words, {"type": "string", "pattern": f"^({'|'.join(map(_any_case, (*words['enum'], *self.aliases)))})$"}]}


def _any_case(word: str) -> str:
    """A pattern for a word; JSON Schema's patterns have no flag for it."""
    return "".join(f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else f"[{letter}]" for letter in word)
