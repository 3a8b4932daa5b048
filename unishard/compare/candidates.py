"""What is compared: combinations of a backend and a strategy, each as overrides of the user's config. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unishard.config import Config
from unishard.errors import ConfigError, Problem
from unishard.loading import load
from unishard.plugins import registry

__all__ = ["Variant", "candidates_of", "overrides_of"]


class Variant(NamedTuple):
    """One row."""

    backend: str
    strategy: str

    def __str__(self) -> str:
        return f"{self.backend} {self.strategy}"


def candidates_of(cfg: Config, backends: str | None, strategies: str | None) -> list[Variant]:
    """Every combination, in the order given; without one, all installed backends, the config's own first, and the config's own strategy.

    Args:
        cfg: The config.
        backends: Names with commas between them.
        strategies: The same.

    Raises:
        ConfigError: A name is unknown.
    """
    installed = sorted(registry.available())
    names = _words(backends) or [cfg.backend, *(name for name in installed if name != cfg.backend)]
    unknown = [name for name in names if name not in installed]
    if unknown:
        raise ConfigError([Problem("--backends", f"{name!r} is unknown; write {' or '.join(installed)}") for name in unknown])
    wanted = list(map(_strategy, _words(strategies))) or [cfg.sharding.strategy]
    return list(dict.fromkeys(Variant(backend, strategy) for backend in names for strategy in wanted))


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").replace(",", " ").split() if word]


def _strategy(word: str) -> str:
    """The strategy's own name, of any spelling that a config may have."""
    try:
        return load({"sharding": {"strategy": word}}).sharding.strategy
    except ConfigError as error:
        raise ConfigError([Problem("--strategies", problem.what) for problem in error.problems]) from None


def overrides_of(cfg: Config, candidate: Variant, folder: Path, changes: Sequence[str]) -> list[str]:
    """The overrides of a candidate's run: it logs each step to `folder`, and saves and traces nothing outside it.

    Args:
        cfg: The config.
        candidate: What differs from it.
        folder: Of the run, absolute.
        changes: The user's overrides.
    """
    return [*changes, *_own(cfg, candidate, folder)]


def _own(cfg: Config, candidate: Variant, folder: Path) -> Iterator[str]:
    yield f"backend={candidate.backend}"
    yield f"sharding.strategy={candidate.strategy}"
    yield "logging=" + json.dumps({"to": ["jsonl"], "every_steps": 1, "dir": str(folder)})
    if cfg.checkpoint.changed:
        yield "checkpoint=" + json.dumps({"dir": str(folder / "checkpoints")} if cfg.checkpoint.dir else {})
    if cfg.profile.changed:
        yield "profile={}"
    launch = {"processes_per_node": cfg.launch.processes_per_node, "environment": dict(cfg.launch.environment)}
    yield "launch=" + json.dumps(launch)
