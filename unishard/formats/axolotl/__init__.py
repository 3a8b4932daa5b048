"""axolotl's YAML, which becomes TrainingArguments of transformers."""

from __future__ import annotations

from unishard.formats.axolotl.format import AxolotlFormat

__all__ = ["FORMAT"]

FORMAT = AxolotlFormat()
