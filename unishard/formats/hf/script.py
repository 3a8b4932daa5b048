"""A format for a script that reads its own arguments and TrainingArguments from one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key
from unishard.contract.render import Rendered
from unishard.contract.rules import Rule
from unishard.formats.hf.dialects import DIALECT
from unishard.formats.hf.format import HfFormat, entries_of
from unishard.formats.reading import ReadDocument
from unishard.formats.source import Source

__all__ = ["ScriptFormat"]

_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Arguments of transformers 5.23 that these scripts still call by the older name."""
_SWITCHES = {"gradient_checkpointing": "activation_checkpointing", "bf16": "precision.compute"}
"""Of arguments that a script may switch on by itself, the field that they decide."""


class ScriptFormat(HfFormat):
    """TrainingArguments with the names and the defaults of a script around them; its other arguments are carried."""

    keys: Mapping[str, Key] = {}
    rules: Mapping[str, Rule] = {}
    own: Mapping[str, Key] = DIALECT
    """Rows for the arguments that are not those of TrainingArguments."""
    switched_on: tuple[str, ...] = ()
    """Arguments that are on unless a file says false, but off in transformers."""

    def silent(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the script assumes where a file is silent and transformers assumes otherwise, by argument."""
        return {}

    def entries(self, source: Source, topology: Topology | None) -> Sequence[Entry]:
        """What the arguments say, and what the script and Trainer assume."""
        return entries_of(source, topology, own=self.own, silent=self.silent(source.data))

    def write(self, reading: ReadDocument, topology: Topology) -> Rendered:
        """The arguments that train; a file also needs those about the model and the data."""
        said = super().write(reading, topology)
        document = {_NAMES.get(key, key): value for key, value in said.document.items()}
        known = reading.decided - reading.undecided.keys()
        off = [key for key in self.switched_on if _SWITCHES[key] in known and key not in document]
        document |= {key: False for key in off if key != "bf16" or reading.config.precision.compute == "fp32"}
        return Rendered(document, {path: word._replace(key=_renamed(word.key)) for path, word in said.fields.items()})


def _renamed(words: str) -> str:
    return ", ".join(_NAMES.get(word, word) for word in words.split(", "))
