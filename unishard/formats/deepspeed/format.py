"""Reads and writes DeepSpeed's JSON, whose keys the engine's own table describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.entries import Entry, KeyEffect, Path, Undecided
from unishard.contract.render import RenderedDocument, render
from unishard.formats.engines.same import without_unishards
from unishard.formats.files.documents import json_text
from unishard.formats.files.source import Source
from unishard.formats.format import Format
from unishard.formats.reading.document import ReadDocument, assemble

_BY_SCRIPT = ("training.micro_batch_size", "training.gradient_accumulation_steps", "training.gradient_clipping")
"""What transformers and Accelerate fill in; DeepSpeed itself refuses `"auto"` here."""
_FOLLOWS = "precision.compute=", "precision.reduce="
"""DeepSpeed reduces in the dtype of compute, so whoever decides the one decides the other."""


class DeepSpeedFormat(Format):
    """JSON of `deepspeed.initialize`."""

    name = "deepspeed"
    tool = "DeepSpeed 0.19.8"
    suffix = ".json"
    engine = "deepspeed"

    def read(self, source: Source, overrides: Iterable[str] = (), topology: Topology | None = None) -> ReadDocument:
        """What the file says.

        Raises:
            ConfigError: An override cannot be used.
        """
        engine = Entry(("backend",), "deepspeed", KeyEffect(fields={"backend": "deepspeed"}), assumed=True)
        entries = [*registry.arguments("deepspeed").read(source.data, topology=topology), engine]
        return assemble(self.name, source, entries, overrides=_completed(tuple(overrides), entries), topology=topology)

    def for_trainer(self, source: Source) -> tuple[Mapping[str, Any], Path | None]:
        """It is the argument `deepspeed`."""
        return {"deepspeed": source.data}, ()

    def write(self, reading: ReadDocument, topology: Topology) -> RenderedDocument:
        """The JSON; what is undecided and a script may pass to DeepSpeed, its optimizer and scheduler, is left to the
        script.
        """
        rules = registry.arguments("deepspeed").rules
        rows = {path: row for path, row in rules.items() if not _is_left_to_script(path, reading)}
        undecided = reading.undecided.keys() | (set(_BY_SCRIPT) - reading.decided)
        document, words = render(rows, reading.config, topology, undecided)
        if "type" not in document.get("optimizer", {"type": ""}):
            document.pop("optimizer")
        return RenderedDocument(without_unishards(document, reading), words)

    def render(self, document: Native, reading: ReadDocument) -> str:
        """JSON, indented."""
        return json_text(document)


FORMAT = DeepSpeedFormat()


def _completed(overrides: tuple[str, ...], entries: Iterable[Entry]) -> tuple[str, ...]:
    """The overrides, and the dtype of reductions where one of them decides that of compute."""
    chosen = [text.removeprefix(_FOLLOWS[0]) for text in overrides if text.startswith(_FOLLOWS[0])]
    factors = [
        (entry.assumed, entry.effect.fields["precision.reduce"])
        for entry in entries
        if "precision.reduce" in entry.effect.fields
    ]
    open_ = all(assumed or isinstance(value, Undecided) for assumed, value in factors) and bool(factors)
    stated = any(text.startswith(_FOLLOWS[1]) for text in overrides)
    return (*overrides, f"{_FOLLOWS[1]}{chosen[-1]}") if chosen and open_ and not stated else overrides


def _is_left_to_script(path: str, reading: ReadDocument) -> bool:
    """Whether the source does not say a field: a size that its tool would not fill in, or of an optimizer or scheduler
    without a name.
    """
    if path in _BY_SCRIPT:
        return not reading.fills_auto and path in reading.unsaid
    section = path.partition(".")[0]
    return (
        section in ("optimizer", "scheduler")
        and f"{section}.name" not in reading.decided
        and path not in reading.decided
    )
