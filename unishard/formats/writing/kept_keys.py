"""The keys of a document that concern nothing but its own tool, and stay where it is written for another engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.nested import Native, merge
from unishard.contract.entries import Path, Undecided
from unishard.contract.render import RenderedDocument
from unishard.formats.reading.document import ReadDocument


def kept_keys(reading: ReadDocument, written: RenderedDocument, renamed: Mapping[Path, tuple[str, Any]]) -> Native:
    """These keys, but for those that the tool has renamed: it refuses both names.

    Args:
        reading: The document.
        written: What is written for its fields.
        renamed: The keys that are written under another name, and their values.
    """
    kept: Native = {}
    for entry in reading.entries:
        block, _, name = renamed.get(entry.path, ("",))[0].rpartition(".")
        if name and block == ".".join(entry.path[:-1]):
            continue
        asked = {field for field, value in entry.effect.fields.items() if isinstance(value, Undecided)}
        still_open = not asked or bool(asked & reading.undecided.keys())
        if entry.effect.copy_verbatim and still_open and not entry.assumed and entry.as_it_is not in written.fields:
            value = entry.value
            for name in reversed(entry.path):
                value = {name: value}
            kept = merge(kept, value)
    return kept
