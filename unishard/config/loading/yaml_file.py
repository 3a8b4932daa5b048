"""Read a YAML file into a document.

ruamel.yaml implements YAML 1.2, where `no` is a string and `1e-5` a number. Only its parser is used: its constructors
stop at the first duplicate key, turn dates into objects, and do not keep a key such as `True` or `0x10` as it is
written. Its round-trip mode, which knows lines, does so too, and takes a quarter more time.
"""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from unishard.config.loading.document import Document
from unishard.config.loading.origins import Origin, Origins, file_error
from unishard.config.loading.text_file import text_of
from unishard.config.loading.yaml_nodes import YamlNodes
from unishard.errors import ConfigError

_MOST_WRITTEN = 25_000
_MOST_LINES = 10_000
_DEEPEST = 100
_TOO_DEEP = "is nested too deeply; the schema has two levels"
_BRACKET = re.compile(r"[][{}]")
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}
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


def from_file(path: Path) -> Document:
    """Read a document from a YAML file.

    Raises:
        ConfigError: The file cannot be read, or is not a YAML mapping.
    """
    if path.suffix == ".py":
        raise file_error(path, "is a script, and the config stands before it; write CONFIG, such as cfg.yaml")
    document = from_text(text_of(path), str(path))
    if document.data is None:
        raise file_error(path, "is empty; write at least 'backend: fsdp'")
    if not isinstance(document.data, dict):
        kind = "a list" if isinstance(document.data, list) else "a single value"
        raise file_error(path, f"contains {kind}; write 'field: value' lines, such as 'backend: fsdp'", line=1)
    return document


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
            document.data = YamlNodes(yaml, name, document, foreign).value_of(node, ())
    except MarkedYAMLError as error:
        raise _broken(error, name) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise file_error(
            name, f"contains the control character #x{error.character:04x}; remove it, or name a YAML file", line
        ) from None
    except _TooManyError:
        raise file_error(
            name, f"has more than {_MOST_WRITTEN} keys and values, which no config has; name another file"
        ) from None
    except RecursionError:
        raise file_error(name, _TOO_DEEP) from None
    return document


def _refuse_endless(text: str, name: str, *, foreign: bool) -> None:
    """Refuse what would take long: the parser's time grows with the square of the depth of brackets, and is 0.2 ms for
    a line.
    """
    if text.count("\n") > _MOST_LINES:
        raise file_error(name, f"has more than {_MOST_LINES} lines, which no config has; name another file")
    if max(accumulate(_DEEPER.get(character, 0) for character in _BRACKET.findall(text)), default=0) > _DEEPEST:
        raise file_error(
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


def _broken(error: MarkedYAMLError, name: str) -> ConfigError:
    problem = str(error.problem or error.context)
    unclosed = "stream" in problem and error.context_mark is not None and "document" not in problem
    mark = error.context_mark if unclosed else error.problem_mark or error.context_mark
    advice = next((text for sign, text in _ADVICE.items() if sign in problem), "check the line and the one before it")
    context = f"{error.context}{',' if problem.startswith('but') else ':'} " if error.context else ""
    return file_error(name, f"is not YAML: {context}{problem}; {advice}", line=mark.line + 1 if mark else None)
