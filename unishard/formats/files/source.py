"""A config file of any tool, as plain data with the line of every key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from unishard.config.loading import Origin, Origins
from unishard.config.loading.origins import file_error
from unishard.config.loading.text_file import text_of
from unishard.config.loading.validation import Finding
from unishard.config.loading.yaml_file import from_text
from unishard.errors import ConfigError, Problem
from unishard.formats.files.json_text import BrokenJson, looks_like_json, parse

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/|\t', re.DOTALL)
_STATEMENT = re.compile(r"^[ \t]*\{%-?\s*(?:if|for|set|include|extends|macro|block)\b[^%\n]*%\}", re.MULTILINE)
_VALUE = re.compile(r"(?<=[:\[,=-])([ \t]*)(\{\{[^{}\n]*\}\}[^\s,\]}#]*)(?=[ \t]*(?:[,\]}#]|$))", re.MULTILINE)
"""A placeholder of Jinja that stands as a value without quotes, which YAML and JSON would take for a mapping."""
_PYTHON = "is Python, which unishard does not run; name a YAML, JSON or TOML file, or run `unishard init`"
_TITAN = "is a Python config of torchtitan, which unishard does not run; run `unishard init`"
_YAML = (".yaml", ".yml")
_ROOT = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""One of these is in the root of a project."""
_DEEPEST = 100
_DOTTED = re.compile(rf"""(?<![\w"'.-])(?:(?:"[^"\n]*+"|'[^'\n]*+'|[\w-]++)[ \t]*+\.[ \t]*+){{{_DEEPEST}}}""")
_LARGEST = 10**400
_STRICT = "transformers 5.23 and Accelerate 1.15.0 refuse it (DeepSpeed 0.19.8 takes it: hjson)"


class Source(NamedTuple):
    """What a file says, before anyone knows which tool's it is."""

    name: str
    """Of the file; empty for a mapping."""
    data: Mapping[str, Any]
    """Text, numbers, booleans, null, and lists and mappings of these; every key is text."""
    origins: Origins
    warnings: tuple[str, ...] = ()
    """What its own tool may not accept."""
    folder: Path | None = None
    """Where relative paths in it start; None for a mapping."""
    repeats: tuple[Problem, ...] = ()
    """Keys of a YAML file that are written twice; the last counts, as in PyYAML, which most tools read with."""
    octal: Mapping[str, int] = {}
    """Numbers of a YAML file that begin with 0, as YAML 1.2 reads them; `data` has them as PyYAML does."""


def open_source(source: str | Path | Mapping[str, Any] | Source) -> Source:
    """Open a YAML, JSON or TOML file, or take a mapping as what one would hold; one that is open already stays as it
    is.

    JSON may have comments and trailing commas, and YAML may merge mappings.

    Raises:
        ConfigError: The file cannot be read, or is no mapping.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        return _checked(Source("", source, Origins(Origin(""))))
    path = Path(source)
    opened = _parsed(text_of(path), path)
    if not isinstance(opened.data, dict):
        kind = "empty" if opened.data is None else "a list" if isinstance(opened.data, list) else "a single value"
        raise file_error(path, f"is {kind}, and a config is a mapping of keys to values; name another file")
    repeats = (f"{repeat}; read as most YAML readers do, which take the last" for repeat in opened.repeats)
    return _checked(opened._replace(warnings=(*opened.warnings, *repeats)))


def open_named(name: str, folder: Path | None) -> Source | None:
    """Open a file that a document names, where `find_named` finds it; None where there is none.

    Raises:
        ConfigError: It cannot be read, or is no mapping.
    """
    path = find_named(name, folder)
    return open_source(path) if path else None


def find_named(name: str, folder: Path | None) -> Path | None:
    """A file that a document names: in its folder, in the working directory, or in a folder above its own up to the
    root of its project.
    """
    path = Path(name).expanduser()
    return next(
        (place / path for place in (folder, Path(), *_above(folder)) if place is not None and _is_file(place / path)),
        None,
    )


def _above(folder: Path | None) -> Iterator[Path]:
    """The folders around one, as people write them from the working directory; none outside a project."""
    if folder is None or not folder.is_dir():
        return
    here, around = Path().resolve(), [folder.resolve(), *folder.resolve().parents]
    last = next((at for at, one in enumerate(around) if one == here or any((one / mark).exists() for mark in _ROOT)), 0)
    for parent in around[1 : last + 1]:
        yield parent.relative_to(here) if parent.is_relative_to(here) else parent


def _is_file(path: Path) -> bool:
    """Also of text that is no path at all."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _parsed(content: str, path: Path) -> Source:
    if path.suffix.lower() == ".py":
        raise file_error(path, _TITAN if "torchtitan" in content else _PYTHON)
    try:
        return _as_it_is(content, path)
    except ConfigError:
        quoted, count = _VALUE.subn(_quoted, content)
        statement = _STATEMENT.search(content)
        if not count and not statement:
            raise
        try:
            return _as_it_is(quoted, path)
        except ConfigError:
            if not statement:
                raise
        line = content.count("\n", 0, statement.start()) + 1
        raise file_error(
            path, f"is a Jinja template ({statement.group().strip()}); render it, and translate the result", line
        ) from None


def _as_it_is(content: str, path: Path) -> Source:
    if path.suffix.lower() == ".toml":
        return Source(str(path), _toml(content, path), Origins(Origin(str(path))), folder=path.parent)
    if not looks_like_json(content):
        return _not_json(content, path)
    try:
        data, origins, leniencies = parse(content, str(path))
    except BrokenJson as error:
        return _nearly_json(content, path, error)
    except ConfigError:
        if path.suffix.lower() not in _YAML:
            raise
        return _yaml(content, path)  # whose readers take a key that is written twice
    warnings = (f"{path}: has {' and '.join(leniencies)}; {_STRICT}",) if leniencies else ()
    return Source(str(path), data, origins, warnings, path.parent)


def _not_json(content: str, path: Path) -> Source:
    """What does not begin as JSON does. In a file that is called JSON, YAML would take `"a": 1,` for the text `1,`."""
    if path.suffix.lower() == ".json" and content.lstrip().startswith('"'):
        raise file_error(path, "is not JSON: a config begins with '{' and ends with '}'; write the brackets", 1)
    return _yaml(content, path)


def _nearly_json(content: str, path: Path, error: BrokenJson) -> Source:
    """What begins like JSON and is none: YAML's flow style, such as `{a: b}`, or a mistake."""
    if path.suffix.lower() in _YAML:
        return _yaml(content, path)
    try:
        source = _yaml(_COMMENT.sub(_blank, content), path)
    except ConfigError:
        raise file_error(path, f"is not JSON: {error.what}", error.line) from None
    warning = f"{path}:{error.line}: is not JSON ({error.what}); read as YAML, but JSON readers refuse it"
    return source._replace(warnings=(warning,))


def _yaml(content: str, path: Path) -> Source:
    document = from_text(content, str(path), foreign=True)
    if document.findings:
        raise ConfigError(_problems(document.findings, path))
    octal = {".".join(map(str, keys)): value for keys, value in document.octal.items()}
    repeats = tuple(_problems(document.repeats, path))
    return Source(str(path), document.data, document.origins, (), path.parent, repeats, octal)


def _problems(findings: Iterable[Finding], path: Path) -> list[Problem]:
    return [Problem(".".join(map(str, one.path)), one.what, str(one.place or path)) for one in findings]


def _toml(content: str, path: Path) -> dict[str, Any]:
    # The parser's time grows with the square of a key's length.
    if _DOTTED.search(content):
        raise file_error(path, f"has a key of more than {_DEEPEST} names, which no config has; write it shorter")
    import tomllib  # only a TOML file needs it

    try:
        return tomllib.loads(content)
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError is a ValueError, as is a number with too many digits
        raise file_error(path, f"is not TOML: {error or 'it is nested too deeply'}; fix the file") from None


def _quoted(value: re.Match[str]) -> str:
    before, text = value.groups()
    return f"{before}{json.dumps(text)}"


def _blank(token: re.Match[str]) -> str:
    text = token.group()
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _checked(source: Source) -> Source:
    """The same with plain values only.

    Raises:
        ConfigError: It holds something that no setting can be.
    """
    problems: list[Problem] = []
    data = _plain(source.data, (), source, problems)
    if problems:
        raise ConfigError(problems)
    return source._replace(data=data)


def _plain(value: Any, keys: tuple[str | int, ...], source: Source, problems: list[Problem]) -> Any:
    if len(keys) > _DEEPEST:
        problems.append(
            _problem(keys[:1], f"is nested more than {_DEEPEST} levels deep, which no config is; write it flat", source)
        )
        return None
    match value:
        case Enum():
            return _plain(value.value, keys, source, problems)
        case Mapping():
            return _mapping(value, keys, source, problems)
        case list() | tuple() | set() | frozenset():
            return [_plain(item, (*keys, index), source, problems) for index, item in enumerate(value)]
        case int() if abs(value) >= _LARGEST:
            problems.append(_problem(keys, "has more than 400 digits; write a number that a setting can have", source))
            return 0
        case None | bool() | int() | float():
            return value
    text = str(value)
    if not _encodes(text):
        problems.append(_problem(keys, "has a lone surrogate (half a character); rewrite the text", source))
    return text


def _mapping(
    value: Mapping[Any, Any], keys: tuple[str | int, ...], source: Source, problems: list[Problem]
) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, item in value.items():
        name = str(key)
        if name in mapping:
            problems.append(
                _problem((*keys, name), "is there twice, as a number and as text; keep one of the two", source)
            )
        if not _encodes(name):
            problems.append(_problem(keys, "has a key with a lone surrogate (half a character); rewrite it", source))
        mapping[name] = _plain(item, (*keys, name), source, problems)
    return mapping


def _encodes(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _problem(keys: tuple[str | int, ...], message: str, source: Source) -> Problem:
    return Problem(".".join(map(str, keys)).encode(errors="replace").decode(), message, str(source.origins.of(keys)))
