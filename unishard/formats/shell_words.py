"""The commands of a shell script, word by word, as far as one can know them without running it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))")
_HEREDOC = re.compile(r"<<-?[ \t]*([\"']?)([\w-]+)\1")
_REDIRECTS = re.compile(r"\d*[<>]+&?\d*")
_ENDS = ";&|\n()"
_MOST = 5
"""Rounds of variables inside variables."""


class Word(NamedTuple):
    """A word of a command, without its quotes."""

    text: str
    line: int


class _Assigned(NamedTuple):
    words: list[Word]
    """One for a text, any number for an array."""
    appends: bool


def commands(text: str) -> list[list[Word]]:
    """The simple commands of a script.

    Variables that hold several words, options or a script are put in; all others stay as `$NAME`.
    """
    found = list(split(text))
    variables = _variables(found)
    expanded = (list(_expanded(words, variables, _MOST)) for words in found if words)
    return [_without_shell(words, variables) for words in expanded]


def split(text: str, line: int = 1) -> Iterator[list[Word]]:
    """The commands of a text, which begins in a line, as they stand."""
    reader = _ShellReader(text, line)
    while not reader.done:
        yield reader.command()


class _ShellReader:
    """Reads one command after another."""

    def __init__(self, text: str, line: int) -> None:
        self._text, self._at, self._line = text.replace("\r\n", "\n"), 0, line
        self._until: list[str] = []
        """Ends of the here-documents that begin after this line."""

    @property
    def done(self) -> bool:
        return self._at >= len(self._text)

    def command(self) -> list[Word]:
        """The words up to the end of a command, without what is redirected."""
        words: list[Word] = []
        target = False
        while not self.done:
            character = self._text[self._at]
            if character == "#":
                self._skip_to("\n")
            elif redirection := _REDIRECTS.match(self._text, self._at):
                self._redirect(redirection.end())
                target = not redirection.group()[-1].isdigit()
            elif character in " \t" or self._text.startswith("\\\n", self._at):
                self._forward(2 if character == "\\" else 1)
            elif character in _ENDS:
                self._end_of(character)
                return words
            elif word := self._word():
                words += [] if target or word.text.startswith("`#") else [word]
                target = False
        return words

    def _redirect(self, end: int) -> None:
        if heredoc := _HEREDOC.match(self._text, self._at):
            self._until.append(heredoc.group(2))
            self._forward(heredoc.end() - self._at - len(heredoc.group(2)) - len(heredoc.group(1)))
        else:
            self._forward(end - self._at)

    def _end_of(self, character: str) -> None:
        self._forward(1)
        if character == "\n":
            for end in self._until:
                closing = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self._text, self._at)
                self._forward((closing.end() if closing else len(self._text)) - self._at)
            self._until = []

    def _word(self) -> Word:
        """A word; of an array, its words with a zero byte between them."""
        line = self._line
        parts: list[str] = []
        while not self.done:
            character = self._text[self._at]
            if character in " \t" or character in "<>" or self._text.startswith("\\\n", self._at):
                break
            if character == "(" and _ASSIGNED.fullmatch("".join(parts)):
                parts.append(self._array())
            elif character in _ENDS:
                break
            else:
                parts.append(self._piece(character))
        return Word("".join(parts), line)

    def _array(self) -> str:
        self._forward(1)
        items = []
        while not self.done and self._text[self._at] != ")":
            if self._text[self._at] in " \t\n\\":
                self._forward(1)
            elif self._text[self._at] == "#":
                self._skip_to("\n")
            else:
                items.append(
                    self._word() if self._text[self._at] not in f"<>{_ENDS}" else Word(self._forward(1), self._line)
                )
        self._forward(1)
        return "\0" + "\0".join(f"{item.line}\1{item.text}" for item in items)

    def _piece(self, character: str) -> str:
        """What one character begins: a quote, a substitution, or itself."""
        if character == "'":
            return self._forward(self._closing("'", 1) - self._at)[1:-1]
        if character == '"':
            return re.sub(
                r'\\(["$`\\])', r"\1", self._forward(self._closing('"', 1) - self._at)[1:-1].replace("\\\n", " \n")
            )
        if character == "\\":
            return self._forward(2)[1:]
        for opening, closing in (("$(", ")"), ("${", "}")):
            if self._text.startswith(opening, self._at):
                return self._forward(self._balanced(opening[1], closing) - self._at)
        if character == "`":
            return self._forward(self._closing("`", 1) - self._at)
        return self._forward(1)

    def _closing(self, quote: str, skip: int) -> int:
        """Where a quote ends; at the end of the text for one that does not."""
        at = self._at + skip
        while at < len(self._text) and self._text[at] != quote:
            at += 2 if self._text[at] == "\\" and quote != "'" else 1
        return min(at + 1, len(self._text))

    def _balanced(self, opening: str, closing: str) -> int:
        depth = 0
        for at in range(self._at + 1, len(self._text)):
            depth += {opening: 1, closing: -1}.get(self._text[at], 0)
            if not depth:
                return at + 1
        return len(self._text)

    def _skip_to(self, character: str) -> None:
        at = self._text.find(character, self._at)
        self._forward((len(self._text) if at < 0 else at) - self._at)

    def _forward(self, count: int) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += count
        self._line += taken.count("\n")
        return taken


def _variables(found: Iterable[list[Word]]) -> dict[str, list[_Assigned]]:
    """What is assigned to each variable, in the order of the script."""
    variables: dict[str, list[_Assigned]] = {}
    for words in found:
        for word in words:
            assignment = _ASSIGNED.match(word.text)
            if assignment:
                value = word.text[assignment.end() :]
                items = (
                    [_item(item) for item in value[1:].split("\0") if item]
                    if value.startswith("\0")
                    else [Word(value, word.line)]
                )
                variables.setdefault(assignment.group(1), []).append(_Assigned(items, bool(assignment.group(2))))
            elif word.text not in ("export", "local", "declare", "readonly", "typeset"):
                break
    return variables


def _item(text: str) -> Word:
    line, _, word = text.partition("\1")
    return Word(word, int(line))


def _expanded(words: Iterable[Word], variables: dict[str, list[_Assigned]], rounds: int) -> Iterator[Word]:
    for word in words:
        named = _VARIABLE.fullmatch(word.text)
        held = _held(variables.get(named.group(1) or named.group(2), [])) if named and rounds else None
        if held is None:
            yield word
        else:
            yield from _expanded(held, variables, rounds - 1)


def _without_shell(words: list[Word], variables: dict[str, list[_Assigned]]) -> list[Word]:
    """The words of `bash -c "..."` in the place of it."""
    at = next((at for at, word in enumerate(words) if word.text.rpartition("/")[2] in ("bash", "sh", "zsh")), None)
    if at is None or not any(word.text in ("-c", "-lc") for word in words[at:]):
        return words
    inner = (part for command in split(words[-1].text, words[-1].line) for part in command)
    return [*words[:at], *_expanded(inner, variables, _MOST)]


def _held(assigned: list[_Assigned]) -> list[Word] | None:
    """The words that a variable stands for; None for one that holds a single value, or is set in several places."""
    if not assigned or any(not one.appends for one in assigned[1:]):
        return None
    words = []
    for one in assigned:
        for item in one.words:
            inner = (
                [part for command in split(item.text, item.line) for part in command] if len(one.words) == 1 else [item]
            )
            words += inner
    put_in = len(words) > 1 or (words and (words[0].text.startswith("-") or words[0].text.endswith(".py")))
    return words if put_in else None
