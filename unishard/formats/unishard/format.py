"""Reads a unishard file entry by entry, and writes one with a comment wherever a decision is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from unishard import __version__, registry
from unishard.config import Config, Section, leaves, value_at
from unishard.errors import ConfigError, Problem
from unishard.formats.reading import Reading, assemble, default_of, placeholder, undecided_in
from unishard.formats.source import Source
from unishard.formats.unishard.text import text_of
from unishard.loading.findings import dotted, findings_of
from unishard.meanings import Entry, Expressed, Expression, Key, Meaning, Undecided, Verdict, Word
from unishard.rules import Native, flat, merge, nested
from unishard.topology import Topology

__all__ = ["UnishardFormat"]

_STAND_INS: Mapping[str, Any] = {"scheduler.total_steps": 2**40, "scheduler.warmup_steps": 2}


class UnishardFormat:
    """Implements `unishard.formats.format.Format`."""

    name = "unishard"
    tool = f"unishard {__version__}"
    suffix = ".yaml"
    keys: Mapping[str, Key] = {}
    expressions: Mapping[str, Expression] = {}

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> Reading:
        """Every leaf is decided: by the file, or by the schema's default.

        Raises:
            ConfigError: The file has mistakes, or an override cannot be used.
        """
        undecided = dict(_placeholders(source.data))
        config = _checked(source, undecided)
        entries = [*_written(config, undecided), *_defaults(config)]
        return assemble(self.name, source, entries, overrides=overrides, topology=topology)

    def write(self, reading: Reading, topology: Topology) -> Expressed:
        """The fields that the source decides, in the order of the schema, and what the chosen engine makes of each."""
        config = reading.config
        rules = registry.get(config.backend).rules
        words = {}
        for path, rule in rules.items():
            fit, note = rule.verdict(config)
            words[path] = Word(Verdict.of(fit), path, note)
        for path, undecided in reading.undecided.items():
            words[path] = Word(Verdict.UNDECIDED, path, f"the value comes from {undecided.who}; write it, or give --set {path}=...")
        return Expressed(_document(reading), words)

    def render(self, document: Native, reading: Reading) -> str:
        """YAML, with a comment at each value that needs a decision."""
        return text_of(document, reading)


def _placeholders(data: Mapping[str, Any]) -> Iterator[tuple[str, Undecided]]:
    for path, value in flat(data):
        if undecided_in(value) == path:
            yield path, Undecided("your training script")


def _checked(source: Source, undecided: Mapping[str, Undecided]) -> Config:
    """The config, with stand-ins where the file has placeholders."""
    values = {path: value for path, value in flat(source.data) if path not in undecided}
    data = nested(values | {path: _STAND_INS[path] for path in undecided if path in _STAND_INS})
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(
            [Problem(dotted(found.path), found.what, str(source.origins.of(found.path))) for found in findings_of(error, data)]
        ) from None


def _written(config: Config, undecided: Mapping[str, Undecided]) -> Iterator[Entry]:
    for path, _ in leaves(Config):
        if path in undecided:
            yield Entry(tuple(path.split(".")), placeholder(path), Meaning(Verdict.UNDECIDED, "", {path: undecided[path]}))
        elif path == "native":
            yield from _native(config)
        elif _is_set(config, path):
            yield Entry(tuple(path.split(".")), value_at(config, path), Meaning(fields={path: value_at(config, path)}))


def _native(config: Config) -> Iterator[Entry]:
    for backend, settings in config.native.items():
        for key, value in flat(settings):
            note = f"only {backend} has this setting, so another engine trains without it"
            yield Entry(("native", backend, *key.split(".")), value, Meaning(Verdict.APPROXIMATE, note, native={f"{backend}.{key}": value}))


def _defaults(config: Config) -> Iterator[Entry]:
    for path, _ in leaves(Config):
        if path != "native" and not _is_set(config, path):
            yield Entry(tuple(path.split(".")), value_at(config, path), Meaning(fields={path: value_at(config, path)}), assumed=True)


def _is_set(config: Config, path: str) -> bool:
    section: Any = config
    for name in path.split("."):
        if name not in section.model_fields_set:
            return False
        section = getattr(section, name)
    return True


def _document(reading: Reading) -> Native:
    """The engine, and what the source decides; a field that is only assumed and equals the schema's default is left out."""
    assumed = {field for entry in reading.entries if entry.assumed for field in entry.meaning.fields}
    values = {path: value_at(reading.config, path) for path, _ in leaves(Config)}
    document: Native = {"backend": reading.config.backend}
    for path, value in values.items():
        if path in reading.undecided:
            document = merge(document, nested({path: placeholder(path)}))
        elif path in reading.decided and not (path in assumed and value == default_of(path, values)):
            document = merge(document, nested({path: _plain(value)}))
        elif path == "native" and value:
            document["native"] = value
    return document


def _plain(value: Any) -> Any:
    """A value as YAML holds it."""
    match value:
        case Section():
            return value.model_dump(exclude_unset=True)
        case list() | tuple():
            return [_plain(item) for item in value]
    return value
