"""transformers' Trainer on either engine: a mixin for it, and for every trainer that is made from it."""

from __future__ import annotations

from unishard.integrations.transformers.arguments import UnishardArguments, UnishardTrainingArguments
from unishard.integrations.transformers.trainer import UnishardMixin, UnishardTrainer

__all__ = ["UnishardArguments", "UnishardMixin", "UnishardTrainer", "UnishardTrainingArguments"]
