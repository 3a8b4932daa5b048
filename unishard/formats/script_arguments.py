"""What a training script gets on its command line, as a mapping of names to values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unishard.formats.shell_words import Word

__all__ = ["ScriptArguments", "script_arguments", "value_of_word"]

_NAME = re.compile(r"--?([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)
_BOOLEANS = {"true": True, "false": False}
_EXPANSION = re.compile(r"\$\(\(?(.*?)\)?\)|`(.*?)`|\$(\w+)", re.DOTALL)


class ScriptArguments(NamedTuple):
    """The arguments of a training script."""

    values: Mapping[str, Any]
    lines: Mapping[str, int]


def script_arguments(words: Sequence[Word]) -> ScriptArguments:
    """Read `--name value`, `--name=value`, and `--name` alone, which is true; several values are a list.

    The value of a variable that is not known is a placeholder such as `${NAME}`.
    """
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    at = 0
    while at < len(words):
        named = _NAME.fullmatch(words[at].text)
        at += 1
        if named is None:
            continue
        name = named.group(1).replace("-", "_")
        given = [named.group(2)] if named.group(2) is not None else []
        while named.group(2) is None and at < len(words) and not _NAME.fullmatch(words[at].text):
            given.append(words[at].text)
            at += 1
        lines[name] = words[at - 1 - (len(given) if named.group(2) is None else 0)].line
        found = [value_of_word(text) for text in given]
        values[name] = True if not found else found[0] if len(found) == 1 else found
    return ScriptArguments(values, lines)


def value_of_word(text: str) -> Any:
    """The value that a word stands for."""
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if text.lstrip().startswith("{") and not text.startswith("{{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return _EXPANSION.sub(_placeholder, text)


def _placeholder(expansion: re.Match[str]) -> str:
    inner = next(group for group in expansion.groups() if group is not None)
    return "${" + re.sub(r"[${}]", "", inner) + "}"
