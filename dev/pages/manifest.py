"""docs/manifest.md: each field of a checkpoint's manifest."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

from pydantic import BaseModel

from dev.pages.markdown import code, generated, table
from unishard.checkpoint import manifest as manifests
from unishard.contract import training_facts
from unishard.contract.training_facts import Facts

_TOP = """\
# The manifest of a checkpoint

Each field of `manifest.json`, which is in every [checkpoint](checkpoint-format.md). A field with a default may be omitted;
unknown fields are rejected.
"""
_PARTS = {
    name: kind
    for module in (manifests, training_facts)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and issubclass(kind, Facts) and kind is not Facts
}
"""The parts of a manifest, by name."""


def manifest() -> str:
    """docs/manifest.md: type, default and description of every field of a checkpoint's manifest."""
    parts = [generated("`unishard.checkpoint.manifest`"), _TOP.rstrip(), _facts(manifests.Manifest)]
    for kind in _PARTS.values():
        if kind is not manifests.Manifest:
            parts += [f"## {kind.__name__}", inspect.getdoc(kind) or "", _facts(kind)]
    return "\n\n".join(parts) + "\n"


def _facts(kind: type[BaseModel]) -> str:
    rows = []
    for name, field in kind.model_fields.items():
        default = "" if field.is_required() else code(field.get_default(call_default_factory=True))
        rows.append((f"`{name}`", _link(field.annotation), default, field.description or ""))
    return table(("Field", "Type", "Default", "Description"), rows)


def _link(annotation: Any) -> str:
    """A type annotation, as a link if the type has its own table."""
    words = annotation.__name__ if inspect.isclass(annotation) and not get_args(annotation) else str(annotation)
    words = re.sub(r"(?:typing|unishard\.checkpoint\.manifest|unishard\.contract\.training_facts)\.", "", words)
    inner = next((name for name in _PARTS if re.search(rf"\b{name}\b", words)), None)
    return f"[`{words}`](#{inner.lower()})" if inner else f"`{words}`"
