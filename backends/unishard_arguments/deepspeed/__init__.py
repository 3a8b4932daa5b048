"""DeepSpeed's JSON as raw `deepspeed.initialize` takes it: what each key says, and how it says each field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unishard.config import Config
from unishard.config.describe import shown
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.contract.entries import DocumentValues, Entry, Key, KeyEffect, Unreadable, interpret
from unishard.contract.fallbacks import rows
from unishard.contract.render import AUTO, RenderedDocument, render
from unishard.contract.rules import Fit, Rule
from unishard.contract.templates import is_placeholder
from unishard_arguments.deepspeed import (
    batch,
    experts,
    offload,
    optimizer,
    precision,
    rest,
    scheduler,
    sequence,
    tensor,
    zero,
)
from unishard_deepspeed.keys import TAKES

__all__ = ["ARGUMENTS"]

_TOOL = "DeepSpeed 0.19.8"
_SECTIONS = (batch, precision, zero, offload, optimizer, scheduler, sequence, experts, tensor, rest)
_ASSUMING = (batch, precision, zero, optimizer, scheduler)
"""Sections in which DeepSpeed assumes something where a config is silent."""
_STRICT = ("zero_optimization.", "bf16.", "bfloat16.", "fp16.", "optimizer.params.", "scheduler.params.")
"""Blocks in which DeepSpeed, or the class that it builds, refuses a key that it does not know; elsewhere it overlooks
one."""


def _block(value: Any, document: DocumentValues) -> KeyEffect:
    if value is None or value == {}:
        return KeyEffect(Fit.IGNORED, "is empty")
    raise Unreadable(f"must be a mapping of keys, got {shown(value)}; write its keys below it", value)


def _blocks(rows: Mapping[str, Key]) -> dict[str, Key]:
    """A row for each mapping above a key, for a document that holds something else there."""
    above = {".".join(key.split(".")[:length]) for key in rows for length in range(1, key.count(".") + 1)}
    return {name: Key(_block, note="a mapping of keys") for name in sorted(above - rows.keys())}


def _all() -> dict[str, Key]:
    # The rest yields to the others.
    rows = {key: row for section in reversed(_SECTIONS) for key, row in section.KEYS.items()}
    return rows | _blocks(rows)


class DeepSpeedArguments:
    """The config that `deepspeed.initialize` takes."""

    keys: Mapping[str, Key] = _all()
    rules: Mapping[str, Rule] = rows(*(section.RULES for section in _SECTIONS))

    def read(
        self, native: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None
    ) -> list[Entry]:
        """What a config says, one entry for each of its keys and one for each default of DeepSpeed that decides
        something.
        """
        values = {key: AUTO if is_placeholder(value) else value for key, value in flat(_undotted(native))}
        document = DocumentValues(values, defaults or {}, topology)
        silent = {key: value for section in _ASSUMING for key, value in section.assumed(document).items()}
        entries = interpret(
            self.keys,
            native,
            tool=_TOOL,
            ignores_unknown=_overlooked,
            defaults={**silent, **(defaults or {})},
            topology=topology,
            accepts=TAKES,
            auto=True,
        )
        return [entry for entry in entries if not (entry.assumed and _says_nothing(entry))]

    def write(self, cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> RenderedDocument:
        """The JSON for a training script that calls `deepspeed.initialize` itself, for the same training."""
        return render(self.rules, cfg, topology, undecided)


ARGUMENTS = DeepSpeedArguments()


def _undotted(native: Mapping[str, Any]) -> dict[str, Any]:
    """The config without names that hold a dot, such as `optimizer.type`, which DeepSpeed does not take for a key in a
    block.
    """
    return {
        name: _undotted(value) if isinstance(value, Mapping) else value
        for name, value in native.items()
        if "." not in str(name)
    }


def _overlooked(key: str) -> bool:
    return not key.startswith(_STRICT)


def _says_nothing(entry: Entry) -> bool:
    effect = entry.effect
    return effect.fit in (Fit.IGNORED, Fit.EXACT) and not effect.fields and not effect.native
