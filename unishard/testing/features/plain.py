"""The loop of the README, in every strategy, with and without accumulation and clipping."""

from __future__ import annotations

from unishard.testing.cells import Feature
from unishard.testing.models import MODELS

PLAIN = (Feature("plain", "the loop of the README", models=MODELS),)
