"""A unishard file in which a comment above each field says what it is."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from unishard.config import Config, Section
from unishard.formats.documents import inline_yaml
from unishard.formats.unishard.text import plain

__all__ = ["described", "value_text"]

_WIDTH = 120


def described(document: Mapping[str, Any], undecided: Mapping[str, str]) -> str:
    """The text of a config, each field below the first sentence of its description.

    Args:
        document: Nested; only the fields that it has are written.
        undecided: Fields whose value is a placeholder, and who knows each.
    """
    return "\n".join(_lines(Config, document, undecided, "")).lstrip("\n") + ("\n" if document else "")


def _lines(
    section: type[Section], document: Mapping[str, Any], undecided: Mapping[str, str], prefix: str
) -> Iterator[str]:
    indent, descriptions = "  " * prefix.count("."), section.descriptions()
    for name, field in section.model_fields.items():
        if name not in document:
            continue
        kind = field.annotation
        inner = kind if isinstance(kind, type) and issubclass(kind, Section) else None
        if not prefix:
            yield ""
        yield from _comment(inspect.getdoc(inner) if inner else descriptions[name], indent)
        if inner:
            yield f"{indent}{name}:"
            yield from _lines(inner, document[name], undecided, f"{prefix}{name}.")
        else:
            who = undecided.get(prefix + name)
            yield f"{indent}{name}: " + (
                f"{document[name]}  # needs your decision: the value comes from {who}"
                if who
                else value_text(document[name])
            )


def _comment(text: str | None, indent: str) -> list[str]:
    """The first sentence."""
    words = " ".join((text or "").split())
    sentence = words.partition(". ")[0].rstrip(".") + "."
    return textwrap.wrap(
        sentence, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False
    )


def value_text(value: Any) -> str:
    """A value as it stands behind a key on one line."""
    return inline_yaml(plain(value))
