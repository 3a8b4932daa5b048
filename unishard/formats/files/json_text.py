"""Reads JSON as people write it in config files: comments, trailing commas and tabs are taken, and named.

Which tools take them: DeepSpeed 0.19.8 reads its config with hjson (runtime/config.py), which does; transformers 5.23
and Accelerate 1.15.0 read JSON with `json.load` (hf_argparser.py, utils/deepspeed.py, commands/config/config_args.py),
which does not.
"""

from __future__ import annotations

import math
import re
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from unishard.config.loading import Origin, Origins
from unishard.errors import ConfigError, Problem

_COMMENT = r"(?>//[^\n]*|/\*.*?\*/|#[^\n]*)"
_START = re.compile(rf"(?>\s+|{_COMMENT})*+\{{(?![{{%])", re.DOTALL)
_GAP = re.compile(rf"(?>[ \t\r\n]+|({_COMMENT}))*+", re.DOTALL)
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"-?[A-Za-z]+")
_WORDS = {"true": True, "false": False, "null": None, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_DEEPEST = 100
_MOST_DIGITS = 400


class BrokenJson(ValueError):
    """The text is not JSON, even read leniently."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.what, self.line = message, line


def looks_like_json(text: str) -> bool:
    """Whether a text begins as a JSON object does."""
    return _START.match(text) is not None


def parse(text: str, name: str) -> tuple[Any, Origins, list[str]]:
    """The value, the line of each key, and what strict readers refuse in it.

    Raises:
        BrokenJson: It is not JSON.
        ConfigError: It is, but a key is written twice or something in it is no setting.
    """
    reader = _Reader(text, name)
    value = reader.whole()
    if reader.problems:
        raise ConfigError(reader.problems)
    return value, reader.origins, reader.leniencies


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._at, self._line, self._counted = 0, 1, 0
        self.origins = Origins(Origin(name, 1))
        self.problems: list[Problem] = []
        self._lenient: dict[str, int] = {}

    @property
    def leniencies(self) -> list[str]:
        return [f"{what} (line {line})" for what, line in self._lenient.items()]

    def whole(self) -> Any:
        self._skip()
        value = self._value(())
        self._skip()
        if self._at < len(self._text):
            raise self._broken("something follows the closing bracket; remove it, or keep one document in the file")
        return value

    def _value(self, keys: tuple[str | int, ...]) -> Any:
        if len(keys) > _DEEPEST:
            raise self._problem(
                keys[:1], f"is nested more than {_DEEPEST} levels deep, which no config is; name another file"
            )
        match self._text[self._at : self._at + 1]:
            case "{":
                return self._object(keys)
            case "[":
                return self._list(keys)
            case '"':
                return self._string()
        return self._number(keys)

    def _object(self, keys: tuple[str | int, ...]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for _ in self._items("}"):
            if self._text[self._at : self._at + 1] != '"':
                raise self._broken("a key in double quotes is needed here; put the name in double quotes")
            line, key = self._here(), self._string()
            self._skip()
            if self._text[self._at : self._at + 1] != ":":
                raise self._broken(f"a colon is missing after {key!r}; write one")
            self._at += 1
            self._skip()
            here = (*keys, key)
            if key in members:
                first = self.origins.of(here).line
                self._find(here, f"is written twice, first on line {first}; keep one of the two", line)
            self.origins.add(here, Origin(self._name, line))
            members.setdefault(key, self._value(here))
        return members

    def _list(self, keys: tuple[str | int, ...]) -> list[Any]:
        elements: list[Any] = []
        for index in self._items("]"):
            elements.append(self._value((*keys, index)))
        return elements

    def _items(self, end: str) -> Any:
        """Stops at each item up to the closing bracket, and goes past the commas between them."""
        opened, index = self._here(), 0
        self._at += 1
        while True:
            self._skip()
            here = self._text[self._at : self._at + 1]
            if here == end:
                self._at += 1
                return
            if not here:
                raise BrokenJson(
                    f"the bracket opened on line {opened} is never closed; write {end!r} at its end", opened
                )
            yield index
            index += 1
            self._skip()
            if self._text[self._at : self._at + 1] == ",":
                comma = self._here()
                self._at += 1
                self._skip()
                if self._text[self._at : self._at + 1] == end:
                    self._lenient.setdefault("a trailing comma", comma)
            elif self._text[self._at : self._at + 1] not in (end, ""):
                raise self._broken(f"a comma or {end!r} is missing before this; write it")

    def _string(self) -> str:
        start = self._at
        try:
            text, self._at = scanstring(self._text, self._at + 1, False)
        except JSONDecodeError as error:
            raise self._broken(
                f"unreadable text ({error.msg}); close the quotes, and write backslashes twice"
            ) from None
        if any(character < " " for character in self._text[start : self._at]):
            self._lenient.setdefault("a control character in text", self._here())
        return str(text)

    def _number(self, keys: tuple[str | int, ...]) -> Any:
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            whole, fraction, exponent = number.groups()
            if len(number.group()) > _MOST_DIGITS:
                self._find(
                    keys, f"has more than {_MOST_DIGITS} digits; write a number that a setting can have", self._here()
                )
                return 0
            return float(number.group()) if fraction or exponent else int(whole)
        name = _WORD.match(self._text, self._at)
        if name and name.group() in _WORDS:
            self._at = name.end()
            return _WORDS[name.group()]
        near = self._text[self._at : self._at + 20].partition("\n")[0]
        meant = _PYTHONS.get(name.group()) if name else None
        raise self._broken(
            f"no value begins with {near!r}; {f'write {meant}' if meant else 'put text in double quotes'}"
        )

    def _skip(self) -> None:
        gap = _GAP.match(self._text, self._at)
        if gap:
            if gap.group(1):
                self._lenient.setdefault("a comment", self._here(gap.start(1)))
            self._at = gap.end()

    def _here(self, at: int | None = None) -> int:
        """The line of a place; counts on from the last one asked for."""
        at = self._at if at is None else at
        self._line += (
            self._text.count("\n", self._counted, at)
            if at >= self._counted
            else -self._text.count("\n", at, self._counted)
        )
        self._counted = at
        return self._line

    def _broken(self, message: str) -> BrokenJson:
        return BrokenJson(message, self._here())

    def _problem(self, keys: tuple[str | int, ...], message: str) -> ConfigError:
        return ConfigError([Problem(".".join(map(str, keys)), message, str(Origin(self._name, self._here())))])

    def _find(self, keys: tuple[str | int, ...], message: str, line: int) -> None:
        self.problems.append(Problem(".".join(map(str, keys)), message, str(Origin(self._name, line))))
