"""What shows that a document is a unishard file: each of its keys is a field of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config

_SURE = 10


def only_fields(data: Mapping[str, Any]) -> int:
    """A large weight if every key is a field of the config, which is no chance in another tool's file."""
    known = Config.model_fields
    sections = (
        (known[key].annotation, value) for key, value in data.items() if key in known and isinstance(value, Mapping)
    )
    inner = all(set(value) <= set(getattr(kind, "model_fields", value)) for kind, value in sections)
    return _SURE * (bool(data) and set(data) <= set(known) and inner)
