"""Configs of DeepSpeed that LLaMA-Factory brings along, in the place of files that are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from unishard.contract.entries import Entry
from unishard.contract.rules import Fit
from unishard.formats.files.source import Source, open_named
from unishard.formats.hf.loop import DEEPSPEED


@cache
def _shipped() -> Mapping[str, Mapping[str, Any]]:
    """What the files hold, by the names that people write."""
    file = Path(__file__).parent / "shipped.json"
    configs: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return configs


def shipped_config(source: Source) -> Mapping[str, Any] | None:
    """What the file holds that a document names, if it is one that LLaMA-Factory brings along and is not here."""
    name = source.data.get(DEEPSPEED)
    if not isinstance(name, str) or open_named(name, source.folder) is not None:
        return None
    path = PurePath(name).as_posix()
    return next((config for known, config in _shipped().items() if path == known or path.endswith(f"/{known}")), None)


def told(entries: Sequence[Entry], name: Any, tool: str) -> list[Entry]:
    """The entries, with that of the argument as the document has it."""
    note = f"was not found; read as the file of this name that comes with {tool}"
    return [
        entry._replace(value=name, assumed=False, effect=entry.effect._replace(fit=Fit.EQUIVALENT, note=note))
        if entry.path == (DEEPSPEED,)
        else entry
        for entry in entries
    ]
