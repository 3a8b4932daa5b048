"""Configs of DeepSpeed that a tool around transformers brings along, in the place of files that are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from unishard.contract.entries import Entry
from unishard.contract.rules import Fit
from unishard.errors import ConfigError
from unishard.formats.hf.loop import DEEPSPEED
from unishard.formats.source import Source, open_named


def opened(text: str, source: Source) -> Mapping[str, Any] | str:
    """What JSON in a text says, or the file of this name holds; or what is wrong with it."""
    try:
        if text.strip().startswith("{"):
            found: Mapping[str, Any] = json.loads(text)
            return found if isinstance(found, dict) else "is no mapping; write {...}, or name a file"
        named = open_named(text, source.folder)
    except ConfigError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error}); fix it, or name a file"
    if named:
        return named.data
    return f"{text} was not found here or in the working directory; add it, or inline its content"


@cache
def shipped(format_: str) -> Mapping[str, Mapping[str, Any]]:
    """What the files hold, by the names that people write."""
    file = Path(__file__).parents[1] / format_ / "shipped.json"
    found: Mapping[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def shipped_config(source: Source, format_: str) -> Mapping[str, Any] | None:
    """What the file holds that a document names, if it is one that the tool brings along and is not here."""
    name = source.data.get(DEEPSPEED)
    if not isinstance(name, str) or open_named(name, source.folder) is not None:
        return None
    path = PurePath(name).as_posix()
    return next(
        (config for known, config in shipped(format_).items() if path == known or path.endswith(f"/{known}")), None
    )


def told(entries: Sequence[Entry], name: Any, tool: str) -> list[Entry]:
    """The entries, with that of the argument as the document has it."""
    note = f"was not found; read as the file of this name that comes with {tool}"
    return [
        entry._replace(value=name, assumed=False, effect=entry.effect._replace(fit=Fit.EQUIVALENT, note=note))
        if entry.path == (DEEPSPEED,)
        else entry
        for entry in entries
    ]
