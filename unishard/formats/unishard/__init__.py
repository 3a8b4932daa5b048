"""unishard's own YAML as one format among the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.formats.format import Deferred
from unishard.formats.markers import Markers, weighted

__all__ = ["FORMAT"]

_SURE = 10


def _only_fields(data: Mapping[str, Any]) -> int:
    """A large weight if every key is a field of the config, which is no chance in another tool's file."""
    known = Config.model_fields
    sections = (
        (known[key].annotation, value) for key, value in data.items() if key in known and isinstance(value, Mapping)
    )
    inner = all(set(value) <= set(getattr(kind, "model_fields", value)) for kind, value in sections)
    return _SURE * (bool(data) and set(data) <= set(known) and inner)


_MARKERS = weighted(
    {
        3: "backend sharding precision.compute native training.micro_batch_size training.gradient_clipping",
        2: "offload communication",
        1: "activation_checkpointing training optimizer.name scheduler.name strict",
    }
)

FORMAT = Deferred("unishard", Markers(_MARKERS, _only_fields))
