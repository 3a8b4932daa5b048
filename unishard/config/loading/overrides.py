"""Overrides such as ``training.micro_batch_size=4``."""

from __future__ import annotations

from collections.abc import Iterator

from unishard.config import Config, Section
from unishard.config.loading.document import Document
from unishard.config.loading.origins import OVERRIDE, Keys
from unishard.config.loading.validation import Finding, unknown
from unishard.config.loading.yaml_file import from_text
from unishard.errors import ConfigError


def override(document: Document, text: str) -> Iterator[Finding]:
    """Apply ``a.b=value`` to a document; if it is invalid, yield the errors and change nothing."""
    path, equals, written = text.partition("=")
    keys: Keys = tuple(path.strip().split("."))
    if not equals:
        yield Finding((), f"{text!r} has no '='; write field=value, such as training.micro_batch_size=4", OVERRIDE)
    elif "" in keys:
        yield Finding(
            (), f"{text!r} does not name a field; write field=value, such as training.micro_batch_size=4", OVERRIDE
        )
    elif not written.strip():
        yield Finding(keys, f"has no value; write {path.strip()}=value, or null for none", OVERRIDE)
    elif problem := _misplaced(keys):
        yield problem
    else:
        try:
            value = from_text(written, "override")
        except ConfigError as error:
            yield from (Finding(keys, problem.what, OVERRIDE) for problem in error.problems)
            return
        yield from (Finding((*keys, *finding.path), finding.what, OVERRIDE) for finding in value.findings)
        _write(document, keys, value.data)


def _misplaced(keys: Keys) -> Finding | None:
    """The error if no field has this path."""
    section: type[Section] = Config
    for depth, name in enumerate(keys):
        field = section.model_fields.get(str(name))
        if field is None:
            return Finding(keys[: depth + 1], unknown(keys[:depth], str(name)), OVERRIDE)
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            section = field.annotation
            continue
        if depth + 1 < len(keys) and "dict" not in str(field.annotation):
            return Finding(
                keys[: depth + 1],
                f"is a single value without a field {keys[depth + 1]!r}; write {name}=value",
                OVERRIDE,
            )
        return None
    return None


def _write(document: Document, keys: Keys, value: object) -> None:
    node = document.data
    kind: type[Section] | None = Config
    for depth, name in enumerate(keys[:-1]):
        kind = section_in(kind, str(name))
        inner = node.get(name)
        if kind is not None:
            inner = kind.expand(inner)
        if inner is None:
            inner = {}
            document.origins.add(keys[: depth + 1], OVERRIDE)
        if not isinstance(inner, dict):
            return  # an error in the file, which the schema reports
        node[name] = inner
        node = inner
    if value is None and section_in(kind, str(keys[-1])):
        node.pop(keys[-1], None)
        return
    node[keys[-1]] = value
    document.origins.put(keys, OVERRIDE)


def section_in(kind: type[Section] | None, name: str) -> type[Section] | None:
    """The section of this name in a section; None where there is none."""
    inner = kind.model_fields[name].annotation if kind is not None else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None
