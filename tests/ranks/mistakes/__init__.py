"""What makes the mistakes of docs/mistakes.md, by subject."""

from __future__ import annotations

from mistakes import calls, checkpoints, configs, damage, data, forwards, habits, loop, models, own_loaders, ranks

__all__ = [
    "calls",
    "checkpoints",
    "configs",
    "damage",
    "data",
    "forwards",
    "habits",
    "loop",
    "models",
    "own_loaders",
    "ranks",
]
