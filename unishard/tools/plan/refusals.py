"""The error of a model that cannot be planned."""

from __future__ import annotations

from unishard.errors import ConfigError, Problem


def refusal(problem: str) -> ConfigError:
    """The error of a model that cannot be planned."""
    return ConfigError([Problem("--model", problem)])
