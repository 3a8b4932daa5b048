"""Reads and writes TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.formats.documents import yaml_text
from unishard.formats.hf.accepted import VALUES
from unishard.formats.hf.assumed import assumed
from unishard.formats.hf.dialects import DIALECT, around, bare, section_in, wrapped
from unishard.formats.hf.expressions import EXPRESSIONS, written
from unishard.formats.hf.keys import ENGINES, KEYS
from unishard.formats.hf.precedence import settled
from unishard.formats.hf.sharding import BOTH, FIRST, known, sharded, whole_copies
from unishard.formats.hf.switches import DEEPSPEED, FSDP
from unishard.formats.hf.zero import partitioned
from unishard.formats.reading import ReadDocument, assemble
from unishard.formats.source import Source
from unishard.mapping.entries import NOTHING, Entry, Key, Meaning, interpret
from unishard.mapping.express import Expressed
from unishard.mapping.rules import Fit, Rule

__all__ = ["FORMAT"]


class HfFormat:
    """Implements `unishard.formats.format.Format`."""

    name = "hf"
    tool = "transformers 5.23"
    suffix = ".yaml"
    keys: Mapping[str, Key] = KEYS
    expressions: Mapping[str, Rule] = EXPRESSIONS

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What the arguments say, those of the engine that they choose, and what Trainer assumes.

        Raises:
            ConfigError: An override cannot be used.
        """
        entries = _bare(source, topology) if _is_bare(source) else _found(source, topology)
        return assemble(self.name, source, entries, overrides=overrides, topology=topology)

    def write(self, reading: ReadDocument, topology: Topology) -> Expressed:
        """Arguments that `transformers.TrainingArguments(**...)` takes; the engine's stand in `fsdp_config` or `deepspeed`."""
        return written(reading, topology)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """YAML."""
        return yaml_text(document, old=True)


FORMAT = HfFormat()


def _is_bare(source: Source) -> bool:
    return bare(source.data, (*BOTH, *FIRST)) or (bool(source.data) and all(known(str(key)) for key in source.data))


def _bare(source: Source, topology: Topology | None) -> list[Entry]:
    """A file that `fsdp_config` names."""
    return sharded(True, source.data, source, topology, where=(), implied=True)


def _found(source: Source, topology: Topology | None) -> list[Entry]:
    """The entries, also where the arguments stand in a section of a script's own file."""
    name = section_in(source.data)
    if name is None:
        return _entries(source, topology)
    found = _entries(replace(source, data=source.data[name]), topology, section=True)
    # Written in its own format again, the arguments stand at the top, and what does not train is left out.
    inner = [replace(entry, path=(name, *entry.path), meaning=replace(entry.meaning, kept=False)) for entry in found]
    return [*inner, *(Entry((str(key),), value, _BESIDE) for key, value in source.data.items() if key != name)]


_BESIDE = Meaning(Fit.IGNORED, "stands beside the TrainingArguments: the script takes it for itself")


def _entries(source: Source, topology: Topology | None, *, section: bool = False) -> list[Entry]:
    data = source.data
    more = section or wrapped(data)
    keys = {**KEYS, **DIALECT} if more else KEYS
    keys = {**assumed(keys, data), **around(data, keys, KEYS)} if more else keys
    whole = any(key in KEYS and key not in ENGINES for key in data)
    if not whole:
        keys = {name: replace(row, silent=NOTHING) for name, row in keys.items()}
    entries = interpret(keys, data, tool="transformers 5.23", topology=topology, accepts=VALUES)
    entries = [entry for entry in entries if entry.path[0] not in ENGINES]

    def argument(key: str) -> Any:
        silent = keys[key].silent if key in keys else NOTHING
        return data.get(key, None if silent is NOTHING else silent)

    return settled([*entries, *_engines(source, argument, topology, whole)])


def _engines(source: Source, argument: Any, topology: Topology | None, whole: bool) -> list[Entry]:
    data = source.data
    entries = []
    if FSDP in data or "fsdp_config" in data:
        entries += sharded(data.get(FSDP), data.get("fsdp_config"), source, topology)
    if DEEPSPEED in data:
        entries += partitioned(data[DEEPSPEED], source, argument, topology)
    if whole and not any("backend" in entry.meaning.fields for entry in entries):
        entries.append(whole_copies())
    return entries
