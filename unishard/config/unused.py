"""Fields that decide nothing under a config, by the marks of the schema."""

from __future__ import annotations

from functools import partial

from unishard.config import Config, leaves, value_at
from unishard.config.relevance import OffAt
from unishard.config.section import needs_of


def why_unused(cfg: Config, path: str) -> str | None:
    """Why a field decides nothing under a config; empty where its own value says so, None where it decides."""
    for need in needs_of(Config)[path]:
        if not need.is_met(partial(value_at, cfg)):
            return need.why
    return "" if any(value_at(cfg, path) == off.value for off in _OFF[path]) else None


_OFF = {path: [mark for mark in field.metadata if isinstance(mark, OffAt)] for path, field in leaves(Config)}
