"""Configs of DeepSpeed that a tool around transformers brings along, in the place of files that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from unishard.config.nested import Native
from unishard.contract.entries import Entry
from unishard.contract.rules import Fit
from unishard.formats.hf.switches import DEEPSPEED
from unishard.formats.source import Source, open_named

__all__ = ["Shipped", "filled_in", "shipped_config", "told"]

Shipped = Mapping[str, Mapping[str, Any]]
"""What the files hold, by their path in the tool's repository."""

_FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def filled_in(zero: Mapping[str, Any], **more: Any) -> Native:
    """A config in which transformers fills in all but how ZeRO shards, as such files are written."""
    switches = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return {**dict.fromkeys(_FILLED, "auto"), **switches, "zero_optimization": zero, **more}


def shipped_config(source: Source, files: Shipped) -> Mapping[str, Any] | None:
    """What the file holds that a document names, if it is one that the tool brings along and is not here."""
    name = source.data.get(DEEPSPEED)
    if not isinstance(name, str) or open_named(name, source.folder) is not None:
        return None
    path = PurePath(name).as_posix()
    return next((files[known] for known in files if path == known or path.endswith(f"/{known}")), None)


def told(entries: Sequence[Entry], name: Any, tool: str) -> list[Entry]:
    """The entries, with that of the argument as the document has it."""
    note = f"was not found; read as the file of this name that comes with {tool}"
    return [
        entry._replace(value=name, assumed=False, meaning=entry.meaning._replace(fit=Fit.EQUIVALENT, note=note))
        if entry.path == (DEEPSPEED,)
        else entry
        for entry in entries
    ]
