"""Reads and writes axolotl's YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.axolotl.expressions import EXPRESSIONS, written
from unishard.formats.axolotl.keys import ENGINES, KEYS, NAMES, TOOL
from unishard.formats.axolotl.sharding import sharded
from unishard.formats.documents import yaml_text
from unishard.formats.hf.precedence import settled
from unishard.formats.hf.sharding import whole_copies
from unishard.formats.hf.switches import DEEPSPEED
from unishard.formats.hf.zero import partitioned
from unishard.formats.reading import ReadDocument, assemble
from unishard.formats.source import Source
from unishard.mapping.entries import NOTHING, Entry, Key, Meaning, interpret
from unishard.mapping.express import Expressed
from unishard.mapping.rules import Fit, Rule

__all__ = ["FORMAT"]

_VARIABLE = re.compile(r"\$\{[^}]+\}")
_SHIPPED = re.compile(r"zero[123](_torch_compile|_bf16)?(_cpuoffload_(all|params))?\.json")
_BACK = {argument: name for name, argument in NAMES.items()}


class AxolotlFormat:
    """Implements `unishard.formats.format.Format`."""

    name = "axolotl"
    tool = TOOL
    suffix = ".yaml"
    keys: Mapping[str, Key] = KEYS
    expressions: Mapping[str, Rule] = EXPRESSIONS

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What a file says, and what axolotl and transformers assume.

        Raises:
            ConfigError: An override cannot be used.
        """
        return assemble(self.name, source, _entries(source, topology), overrides=overrides, topology=topology)

    def write(self, reading: ReadDocument, topology: Topology) -> Expressed:
        """The keys that train; a file also needs `base_model` and `datasets`."""
        return written(reading, topology)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """YAML."""
        return yaml_text(document, old=True)


FORMAT = AxolotlFormat()


def _entries(source: Source, topology: Topology | None) -> list[Entry]:
    named = {key: value for key, value in source.data.items() if isinstance(value, str) and _VARIABLE.fullmatch(value.strip())}
    foreign = {key: value for key, value in source.data.items() if key in _BACK and key not in KEYS and key not in named}
    plain = replace(source, data={key: value for key, value in source.data.items() if key not in named and key not in foreign})
    data = plain.data
    keys = {NAMES.get(name, name): row for name, row in KEYS.items()}
    keys |= {name: replace(row, silent=NOTHING) for name, row in keys.items() if _BACK.get(name, name) in named}
    document = {NAMES.get(str(name), str(name)): value for name, value in data.items()}
    entries = [
        entry for entry in interpret(keys, document, tool=TOOL, ignores_unknown=True, topology=topology) if entry.path[0] not in ENGINES
    ]
    entries += [_variable(key, value) for key, value in named.items()]

    def argument(key: str) -> Any:
        silent = keys[key].silent if key in keys else NOTHING
        return document.get(key, None if silent is NOTHING else silent)

    found = [_back(entry) for entry in settled([*entries, *_engines(plain, argument, topology)])]
    return found + [_foreign(key, value) for key, value in foreign.items()]


def _back(entry: Entry) -> Entry:
    """The entry under axolotl's name."""
    return replace(entry, path=(_BACK.get(entry.path[0], entry.path[0]), *entry.path[1:]))


def _foreign(key: str, value: Any) -> Entry:
    note = f"{TOOL} does not know this name of transformers' and ignores it; did you mean {_BACK[key]!r}?"
    return Entry((key,), value, Meaning(Fit.IGNORED, note, kept=True))


def _variable(key: str, value: str) -> Entry:
    note = f"the value comes from {value}, which fills in this template; write the value"
    return Entry((key,), value, Meaning(Fit.NEEDS_INPUT, note, kept=True))


def _engines(source: Source, argument: Any, topology: Topology | None) -> list[Entry]:
    entries = sharded(source, topology)
    if DEEPSPEED in source.data:
        entries += [_shipped(entry) for entry in partitioned(source.data[DEEPSPEED], source, argument, topology)]
    if not any("backend" in entry.meaning.fields for entry in entries):
        entries.append(whole_copies())
    return entries


def _shipped(entry: Entry) -> Entry:
    """The entry, with where to find a file that axolotl brings along."""
    name = PurePath(str(entry.value)).name
    if entry.meaning.fit is not Fit.NEEDS_INPUT or not _SHIPPED.fullmatch(name):
        return entry
    note = f"is one of the files that axolotl brings along; get it with `axolotl fetch deepspeed_configs`, and put it at {entry.value}"
    return replace(entry, meaning=replace(entry.meaning, note=note))
