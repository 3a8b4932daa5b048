"""The config that `unishard launch` hands to the script: `unishard.load()` without a path."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from unishard.config.loading.yaml_file import from_file
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
    global _used
    handed = _given(environ)
    _used = True
    return handed


def _given(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    path = environ.get(CONFIG)
    if not path:
        message = (
            "load() without a path reads the config that `unishard launch` was given, but this script was started "
            "without it; start it with `unishard launch cfg.yaml train.py`, set the environment variable "
            f"{CONFIG}=cfg.yaml, or write unishard.load('cfg.yaml')"
        )
        raise ConfigError([Problem("", message)])
    text = environ.get(OVERRIDES) or "[]"
    try:
        overrides = json.loads(text)
    except ValueError:
        overrides = None
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        message = (
            f"the environment variable {OVERRIDES} is {text!r}, not a JSON list of overrides; unset it or write "
            '["training.seed=3"]'
        )
        raise ConfigError([Problem("", message)])
    return path, overrides


def note_read(path: str | Path) -> None:
    """Note that a config has been read by its own path."""
    _read.add(os.path.realpath(path))


def unused(environ: Mapping[str, str] = os.environ) -> str:
    """What of the config that `unishard launch` was given this script has not read, in a sentence; empty if it has read
    it, or if nothing in it is about the training.
    """
    if _used or not environ.get(CONFIG):
        return ""
    try:
        path, overrides = _given(environ)
        sections = from_file(Path(path)).data.keys() - {"launch"}
    except ConfigError:
        return ""  # whoever reads it is told
    changes = [each for each in overrides if not each.startswith("launch.")]
    if not changes and (not sections or os.path.realpath(path) in _read):
        return ""
    arguments = " and ".join([path, *(f"--set {change}" for change in changes)])
    return (
        f"`unishard launch` was given {arguments}, and this script trains without it; call unishard.load() without a "
        "path to train with it"
    )


_used = False
"""Whether the config that was handed over has been read."""
_read: set[str] = set()
"""Files of configs that were read by their own path."""
