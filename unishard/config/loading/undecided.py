"""Validate the text of a unishard file that still contains placeholders."""

from __future__ import annotations

from collections.abc import Sequence

from unishard.config import Config, leaves
from unishard.config.loading import merge_overrides
from unishard.config.loading.placeholders import stand_ins
from unishard.config.loading.unused_fields import leave_out, open_lines
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
    left = open_lines(document.data) & _FIELDS.keys() - changed
    for path in left:
        leave_out(document.data, path)
    document.findings = [found for found in document.findings if dotted(found.path) not in left]
    temporary = stand_ins(dict(flat(document.data)), left)
    return merge_overrides(document, [*changes, *(f"{path}={value}" for path, value in temporary.items())])[0]
