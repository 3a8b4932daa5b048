"""Validate the text of a unishard file that still contains placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unishard.config import Config, leaves
from unishard.config.loading import merge_overrides
from unishard.config.loading.placeholders import stand_ins, undecided_in
from unishard.config.loading.validation import dotted
from unishard.config.loading.yaml_file import from_text
from unishard.config.nested import flat

_FIELDS = dict(leaves(Config))


def check_text(text: str, name: str, changes: Sequence[str] = ()) -> Config:
    """Validate a unishard file that may contain placeholders such as `${optimizer.lr}`.

    Raises:
        ConfigError: The file or an override has errors.
    """
    document = from_text(text, name)
    changed = {change.partition("=")[0].strip() for change in changes}
    left = {
        path
        for path, value in flat(document.data)
        if undecided_in(value) == path and path in _FIELDS and path not in changed
    }
    for path in left:
        _leave_out(document.data, path.split("."))
    document.findings = [found for found in document.findings if dotted(found.path) not in left]
    temporary = stand_ins(dict(flat(document.data)), left)
    return merge_overrides(document, [*changes, *(f"{path}={value}" for path, value in temporary.items())])[0]


def _leave_out(data: Any, keys: Sequence[str]) -> None:
    for name in keys[:-1]:
        data = data[name]
    del data[keys[-1]]
