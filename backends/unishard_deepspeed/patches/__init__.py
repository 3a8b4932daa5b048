"""The private names of DeepSpeed that rare cases need: this table, and one module a case beside it. Imports no torch."""

from __future__ import annotations

from unishard.patches import by_name

__all__ = ["PATCHES"]

PATCHES = by_name()
