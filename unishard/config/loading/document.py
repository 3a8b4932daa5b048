"""Read a YAML file into plain data with the line of every key.

ruamel.yaml implements YAML 1.2, where `no` is a string and `1e-5` a number. Only its parser is used: the values are
built here, because its constructors stop at the first duplicate key and turn dates into objects.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from unishard.config.describe import shown
from unishard.config.loading.origins import Keys, Origin, Origins
from unishard.config.loading.validation import Finding
from unishard.errors import ConfigError, Problem

_LARGEST = 2**20
_MOST_NODES = 200_000
_MOST_WRITTEN = 25_000
_MOST_LINES = 10_000
_DEEPEST = 100
_TOO_DEEP = "is nested too deeply; the schema has two levels"
_BRACKET = re.compile(r"[][{}]")
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_VARIABLE = re.compile(r"\$\{[^}]*\}")
_TAG = "tag:yaml.org,2002:"
_TEXT = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value"}
_TYPED = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}
_ADVICE = {
    "\\t": "indent with spaces, not with tabs",
    "mapping values are not allowed": "put the value in quotes, or check the indentation",
    "stream end": "close the bracket that is opened here",
    "end of stream": "close the quote that is opened here",
    "<block end>": "check the indentation",
    "another document": "keep one document in the file",
    "undefined alias": "define it with & first, or put the value in quotes",
    "cannot start any token": "put the value in quotes",
}


@dataclass(slots=True)
class Document:
    """The content of a config file before validation."""

    data: Any
    origins: Origins
    findings: list[Finding] = field(default_factory=list)
    repeats: list[Finding] = field(default_factory=list)
    """Duplicate keys in another tool's file; its reader takes the last one."""
    octal: dict[Keys, int] = field(default_factory=dict)
    """Numbers with a leading zero in another tool's file, as YAML 1.2 reads them: `010` is 8 in its data, as YAML 1.1
    reads it, and 10 here."""


def from_mapping(source: Mapping[str, Any]) -> Document:
    """Make a document from a mapping."""
    document = Document(None, Origins(Origin("")))
    document.data = _plain(source, (), document.findings)
    return document


def from_file(path: Path) -> Document:
    """Read a document from a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not a YAML mapping.
    """
    document = from_text(text_of(path), str(path))
    if document.data is None:
        raise _whole(path, "is empty; write at least 'backend: fsdp'")
    if not isinstance(document.data, dict):
        kind = "a list" if isinstance(document.data, list) else "a single value"
        raise _whole(path, f"contains {kind}; write 'field: value' lines, such as 'backend: fsdp'", line=1)
    return document


def section_of(document: Document, name: str) -> Document:
    """The section of a file that has more than a config, as a document.

    Args:
        document: The whole file, in which only the section has to be what a config may contain.
        name: Dotted name of the section.

    Raises:
        ConfigError: The file has no such section.
    """
    keys = tuple(name.split("."))
    data = document.data
    for depth, key in enumerate(keys):
        if not isinstance(data, Mapping) or key not in data:
            known = f"; it has {', '.join(map(str, data))}" if isinstance(data, Mapping) and data else ""
            raise ConfigError(
                [
                    Problem(
                        "",
                        f"has no section {'.'.join(keys[: depth + 1])!r}{known}",
                        str(document.origins.of(keys[:depth])),
                    )
                ]
            )
        data = data[key]
    if not isinstance(data, Mapping):
        raise ConfigError([Problem("", f"has no fields in the section {name!r}", str(document.origins.of(keys)))])
    findings = [
        found._replace(path=found.path[len(keys) :]) for found in document.findings if found.path[: len(keys)] == keys
    ]
    return Document(data, document.origins.below(keys), findings)


def without_own_sections(document: Document) -> Document:
    """The document without the top-level keys `x-...`, which are the user's own; they may contain anything."""
    if not isinstance(document.data, Mapping):
        return document
    own = {key for key in document.data if key.startswith("x-")}
    data = {key: value for key, value in document.data.items() if key not in own}
    return Document(
        data, document.origins, [found for found in document.findings if not own.intersection(found.path[:1])]
    )


def from_text(text: str, name: str, *, foreign: bool = False) -> Document:
    """Parse a document from YAML; its data may be any value.

    Args:
        text: YAML, or JSON, which is a subset of YAML 1.2.
        name: Name of the file, for messages.
        foreign: Whether it is another tool's file, which may merge mappings (`<<`) and contain variables.

    Raises:
        ConfigError: The text is not YAML.
    """
    _refuse_endless(text, name, foreign=foreign)
    document = Document(None, Origins(Origin(name, 1)))
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    yaml.composer.warn_double_anchors = False  # YAML allows redefining an anchor
    try:
        node = yaml.compose(text)
        if node is not None:
            document.data = _Builder(yaml, name, document, foreign).build(node, ())
    except MarkedYAMLError as error:
        raise _broken(error, name) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _whole(
            name, f"contains the control character #x{error.character:04x}; remove it, or name a YAML file", line
        ) from None
    except _TooManyError:
        raise _whole(
            name, f"has more than {_MOST_WRITTEN} keys and values, which no config has; name another file"
        ) from None
    except RecursionError:
        raise _whole(name, _TOO_DEEP) from None
    return document


def _refuse_endless(text: str, name: str, *, foreign: bool) -> None:
    """Refuse what would take long: the parser's time grows with the square of the depth of brackets, and is 0.2 ms for
    a line.
    """
    if text.count("\n") > _MOST_LINES:
        raise _whole(name, f"has more than {_MOST_LINES} lines, which no config has; name another file")
    if max(accumulate(_DEEPER.get(character, 0) for character in _BRACKET.findall(text)), default=0) > _DEEPEST:
        raise _whole(
            name,
            f"nests more than {_DEEPEST} brackets, which no config does; name another file" if foreign else _TOO_DEEP,
        )


class _TooManyError(Exception):
    """A document has more nodes than a config."""


class _Composer(Composer):
    """Counts what is written, while it is parsed."""

    _written = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._written += 1
        if self._written > _MOST_WRITTEN:
            raise _TooManyError
        return super().compose_node(parent, index)


def text_of(path: Path, largest: int = _LARGEST) -> str:
    """The text of a config file.

    Args:
        path: The file.
        largest: Its largest size in bytes.

    Raises:
        ConfigError: The file does not exist or is not text.
    """
    content = _bytes(path, largest)
    if len(content) > largest:
        raise _whole(path, f"is larger than {largest} bytes; name a config file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise _whole(
            path, f"is not UTF-8 text (byte 0x{byte:02x} at offset {error.start}); name a YAML file saved as UTF-8"
        ) from None


def _bytes(path: Path, largest: int) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            content = file.read(largest + 1)
            if not content and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise _whole(path, "is an empty pipe; name a YAML file, or start the writer of the pipe first")
            return content
    except FileNotFoundError:
        near = get_close_matches(
            path.name, (p.name for kind in ("*.y*ml", "*.json", "*.toml") for p in path.parent.glob(kind)), 1
        )
        hint = f"did you mean {str(path.parent / near[0])!r}?" if near else "name a YAML file"
        raise _whole(path, f"file not found; {hint}") from None
    except IsADirectoryError:
        raise _whole(path, "is a directory; name a YAML file in it") from None
    except OSError as error:
        raise _whole(path, f"cannot be read ({error.strerror}); name a readable YAML file") from None
    except ValueError as error:  # a NUL in the name
        raise _whole(path, f"is not a path ({error}); name a YAML file") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe, whose content is waited for."""
    wait_not = getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | wait_not)
    if wait_not:
        os.set_blocking(descriptor, True)
    return descriptor


def _whole(name: Path | str, what: str, line: int | None = None) -> ConfigError:
    return ConfigError([Problem("", what, str(Origin(str(name), line)))])


def _broken(error: MarkedYAMLError, name: str) -> ConfigError:
    problem = str(error.problem or error.context)
    unclosed = "stream" in problem and error.context_mark is not None and "document" not in problem
    mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
    advice = next((text for sign, text in _ADVICE.items() if sign in problem), "check the line and the one before it")
    context = f"{error.context}{',' if problem.startswith('but') else ':'} " if error.context else ""
    return _whole(name, f"is not YAML: {context}{problem}; {advice}", line=mark.line + 1 if mark else None)


class _Builder:
    """Builds plain values from YAML nodes and records their lines."""

    def __init__(self, yaml: YAML, name: str, document: Document, foreign: bool) -> None:
        self._constructor = yaml.constructor
        self._name, self._document, self._foreign = name, document, foreign
        self._open: list[Node] = []
        self._built = 0

    def build(self, node: Node, keys: Keys) -> Any:
        self._built += 1
        if self._built > _MOST_NODES:  # a few lines of aliases to aliases can mean billions of values
            raise _whole(
                self._name, f"contains more than {_MOST_NODES} values after expanding its aliases; name another file"
            )
        if any(node is other for other in self._open):
            return self._find(keys, "refers to itself; write the value", node)
        self._open.append(node)
        try:
            if isinstance(node, MappingNode) and node.tag == f"{_TAG}map":
                return self._mapping(node, keys)
            if isinstance(node, SequenceNode) and node.tag == f"{_TAG}seq":
                return [self.build(item, (*keys, index)) for index, item in enumerate(node.value)]
            if isinstance(node, ScalarNode):
                return self._scalar(node, keys)
            return self._tagged(node, keys)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, keys: Keys) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._find(keys, "has a key that is not a string; write 'field: value' lines", key_node)
                continue
            key, here = key_node.value, (*keys, key_node.value)
            if key_node.tag == f"{_TAG}merge" and self._foreign:
                merged |= self._merged(value_node, keys)
            elif key_node.tag == f"{_TAG}merge":
                self._find(here, "merge keys are not part of YAML 1.2; write out the fields", key_node)
            elif key in found and self._foreign:
                first = self._document.origins.of(here).line
                what = f"is a duplicate of line {first}; remove one of the two"
                self._document.repeats.append(Finding(here, what, self._place(key_node)))
                self._document.origins.put(here, self._place(key_node))
                found[key] = self.build(value_node, here)
            elif key in found:
                self._find(
                    here,
                    f"is a duplicate of line {self._document.origins.of(here).line}; remove one of the two",
                    key_node,
                )
            else:
                if key in merged:
                    self._document.origins.put(here, self._place(key_node))
                self._document.origins.add(here, self._place(key_node))
                found[key] = self.build(value_node, here)
        return merged | found

    def _merged(self, node: Node, keys: Keys) -> dict[str, Any]:
        """The fields of a merge key; the first of several mappings wins."""
        parts = node.value if isinstance(node, SequenceNode) else [node]
        found = [self.build(part, keys) for part in reversed(parts)]
        return {key: value for part in found if isinstance(part, dict) for key, value in part.items()}

    def _scalar(self, node: ScalarNode, keys: Keys) -> Any:
        if str(node.tag) in _TEXT and self._foreign:
            return node.value
        if str(node.tag) in _TEXT:
            return _checked(node.value, keys, self._document.findings, self._place(node))
        if str(node.tag) not in _TYPED:
            return self._tagged(node, keys)
        try:
            value = self._constructor.construct_object(node)
        except (ValueError, ArithmeticError):
            return self._find(keys, f"cannot be read as a number: {node.value[:40]!r}; write digits", node)
        if self._foreign and isinstance(value, int) and _OCTAL.fullmatch(node.value):
            self._document.octal[keys] = value
            return int(node.value.replace("_", ""), 8)
        return value if self._foreign else _checked(value, keys, self._document.findings, self._place(node))

    def _tagged(self, node: Node, keys: Keys) -> None:
        self._find(
            keys, f"has the YAML tag {str(node.tag).replace(_TAG, '!!'):.60}, which is not supported; remove it", node
        )

    def _find(self, keys: Keys, what: str, node: Node) -> None:
        self._document.findings.append(Finding(keys, what, self._place(node)))

    def _place(self, node: Node) -> Origin:
        return Origin(self._name, node.start_mark.line + 1)


def _plain(value: Any, keys: Keys, findings: list[Finding]) -> Any:
    """Copy a caller's mapping, so that overrides do not change it."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                findings.append(
                    Finding(keys, f"has the key {shown(key)}, which is not a string; write the name of a field")
                )
        return {key: _plain(item, (*keys, key), findings) for key, item in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return [_plain(item, (*keys, index), findings) for index, item in enumerate(value)]
    return _checked(value, keys, findings)


def _checked(value: Any, keys: Keys, findings: list[Finding], place: Origin | None = None) -> Any:
    """Return the value; record what no field may contain."""
    if isinstance(value, str) and (variable := _VARIABLE.search(value)):
        findings.append(Finding(keys, _undecided(value, keys) or _expanded(variable.group()), place, of_value=True))
    if isinstance(value, float) and not math.isfinite(value):
        findings.append(Finding(keys, f"is {value}; write a finite number", place, of_value=True))
    return value


def _expanded(name: str) -> str:
    return f"contains {name}, but environment variables are not expanded; write the value, or set it with an override"


def _undecided(value: str, keys: Keys) -> str:
    """The message for a placeholder that `unishard translate` left, such as `${training.micro_batch_size}`; empty for
    other strings.
    """
    path = ".".join(map(str, keys))
    if value != f"${{{path}}}":
        return ""
    return (
        "needs a value: the config that this was translated from does not set it; write the value, or set it with "
        f"the override {path}=..."
    )
