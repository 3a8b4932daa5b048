"""The key-value cache that transformers models fill in each forward, and that training does not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def caches_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The caches in the arguments of a block."""
    return [value for value in (*args, *kwargs.values()) if _is_cache(value)]


def all_empty(caches: Iterable[Any]) -> bool:
    """Whether no layer has filled them yet, so that a forward without them has the same result."""
    try:
        return not any(cache.get_seq_length() for cache in caches)
    except ValueError:  # states without a length, such as Mamba's
        return False


def without_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block without a cache."""
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
