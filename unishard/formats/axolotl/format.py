"""Reads and writes axolotl's YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from unishard.config.topology import Topology
from unishard.contract.entries import NOTHING, Entry, KeyEffect, interpret, left_out
from unishard.contract.render import Rendered
from unishard.contract.rules import Fit
from unishard.formats.axolotl.keys import ENGINES, KEYS, TOOL
from unishard.formats.axolotl.rules import RULES, written
from unishard.formats.axolotl.sharding import sharded
from unishard.formats.format import Format
from unishard.formats.hf.kept import ARGUMENTS, AXOLOTL
from unishard.formats.hf.loop import DEEPSPEED
from unishard.formats.hf.sharding import replicated
from unishard.formats.hf.shipped import shipped_config, told
from unishard.formats.hf.zero import partitioned, with_precedence
from unishard.formats.names import names
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source

_VARIABLE = re.compile(r"\$\{[^}]+\}")
_SHIPPED = re.compile(r"zero[123](_torch_compile|_bf16)?(_cpuoffload_(all|params))?\.json")
_BACK = {argument: name for name, argument in AXOLOTL.items()}


class AxolotlFormat(Format):
    """YAML of axolotl."""

    name = "axolotl"
    tool = TOOL
    keys = KEYS
    rules = RULES
    needed = names(
        "base_model datasets|pretraining_dataset learning_rate micro_batch_size|batch_size "
        "gradient_accumulation_steps|batch_size"
    )
    yaml_1_1 = True
    fills_auto = True

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What a file says, and what axolotl and transformers assume."""
        return _entries(source, topology)

    def write(self, reading: ReadDocument, topology: Topology) -> Rendered:
        """The keys that train."""
        return written(reading, topology, {AXOLOTL.get(name, name) for name in KEYS} & ARGUMENTS)


FORMAT = AxolotlFormat()


def _entries(source: Source, topology: Topology | None) -> list[Entry]:
    named = {
        key: value
        for key, value in source.data.items()
        if isinstance(value, str) and _VARIABLE.fullmatch(value.strip())
    }
    foreign = {
        key: value for key, value in source.data.items() if key in _BACK and key not in KEYS and key not in named
    }
    plain = source._replace(
        data={key: value for key, value in source.data.items() if key not in named and key not in foreign}
    )
    data = plain.data
    keys = {AXOLOTL.get(name, name): row for name, row in KEYS.items()}
    keys |= {name: row._replace(tool_default=NOTHING) for name, row in keys.items() if _BACK.get(name, name) in named}
    document = {AXOLOTL.get(str(name), str(name)): value for name, value in data.items()}
    entries = [
        entry
        for entry in interpret(keys, document, tool=TOOL, ignores_unknown=True, topology=topology)
        if entry.path[0] not in ENGINES
    ]
    entries += [_variable(key, value) for key, value in named.items()]

    def argument(key: str) -> Any:
        silent = keys[key].tool_default if key in keys else NOTHING
        return document.get(key, None if silent is NOTHING else silent)

    found = [_back(entry) for entry in with_precedence([*entries, *_engines(plain, argument, topology)])]
    return found + [_foreign(key, value) for key, value in foreign.items()]


def _back(entry: Entry) -> Entry:
    """The entry under axolotl's name."""
    return entry._replace(path=(_BACK.get(entry.path[0], entry.path[0]), *entry.path[1:]))


def _foreign(key: str, value: Any) -> Entry:
    note = f"{TOOL} ignores this name of transformers; did you mean {_BACK[key]!r}?"
    return Entry((key,), value, left_out(note))


def _variable(key: str, value: str) -> Entry:
    note = f"the value comes from {value}, which fills in this template; write the value"
    return Entry((key,), value, KeyEffect(Fit.NEEDS_INPUT, note, copy_verbatim=True))


def _engines(source: Source, argument: Any, topology: Topology | None) -> list[Entry]:
    entries = sharded(source, topology)
    if DEEPSPEED in source.data:
        config = shipped_config(source, "axolotl")
        found = partitioned(source.data[DEEPSPEED] if config is None else config, source, argument, topology)
        entries += [_shipped(entry) for entry in found] if config is None else told(found, source.data[DEEPSPEED], TOOL)
    if not any("backend" in entry.effect.fields for entry in entries):
        entries.append(replicated())
    return entries


def _shipped(entry: Entry) -> Entry:
    """The entry, with where to find a file that axolotl brings along."""
    name = PurePath(str(entry.value)).name
    if entry.effect.fit is not Fit.NEEDS_INPUT or not _SHIPPED.fullmatch(name):
        return entry
    note = f"ships with axolotl; run `axolotl fetch deepspeed_configs`, put it at {entry.value}"
    return entry._replace(effect=entry.effect._replace(note=note))
