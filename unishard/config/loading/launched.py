"""The config that `unishard launch` hands to the script: `unishard.load()` without a path."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from unishard.errors import ConfigError, Problem

CONFIG = "UNISHARD_CONFIG"
"""The path of the config."""
OVERRIDES = "UNISHARD_OVERRIDES"
"""A JSON list of overrides; unset without any."""


def variables(path: str, overrides: Sequence[str]) -> dict[str, str]:
    """The environment variables that hand a config to a script."""
    return {CONFIG: path} | ({OVERRIDES: json.dumps(list(overrides))} if overrides else {})


def handed_over(environ: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """The path of the config and the overrides that `unishard launch` was given.

    Raises:
        ConfigError: Nothing was handed over, or the overrides cannot be read.
    """
    path = environ.get(CONFIG)
    if not path:
        what = (
            "load() without a path reads the config that `unishard launch` was given, but this script was started "
            "without it; start it with `unishard launch cfg.yaml train.py`, set the environment variable "
            f"{CONFIG}=cfg.yaml, or write unishard.load('cfg.yaml')"
        )
        raise ConfigError([Problem("", what)])
    text = environ.get(OVERRIDES) or "[]"
    try:
        overrides = json.loads(text)
    except ValueError:
        overrides = None
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        what = (
            f"the environment variable {OVERRIDES} is {text!r}, not a JSON list of overrides; unset it or write "
            '["training.seed=3"]'
        )
        raise ConfigError([Problem("", what)])
    return path, overrides
