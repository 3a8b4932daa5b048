"""TrainingArguments of transformers, as YAML, JSON or a mapping."""

from __future__ import annotations

from unishard.formats.hf.format import HfFormat

__all__ = ["FORMAT"]

FORMAT = HfFormat()
