"""Mistakes that people make, by subject, with what unishard does about each: docs/mistakes.md is written from them."""

from __future__ import annotations

from mistakes.calls import HABITS
from mistakes.checkpoints import CHECKPOINTS
from mistakes.configs import CONFIGS
from mistakes.damage import DAMAGE
from mistakes.loop import LOOP
from mistakes.models import MODELS
from mistakes.own_loaders import DATA
from mistakes.ranks import RANKS

SUBJECTS = (CONFIGS, LOOP, MODELS, HABITS, DATA, RANKS, CHECKPOINTS, DAMAGE)
