"""What is compared: combinations of a backend and a strategy, each as overrides of the user's config. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unishard.config import Config
from unishard.config.loading import load
from unishard.contract import registry
from unishard.errors import ConfigError, Problem
from unishard.tools.plan.candidates import strategy_changes


class ComparedRow(Protocol):
    """What is run."""

    @property
    def folder(self) -> str:
        """The name of its folder."""
        ...

    def changes(self, cfg: Config) -> Sequence[str]:
        """The overrides of the user's config."""
        ...

    def as_json(self) -> dict[str, Any]:
        """What it is."""
        ...


class Variant(NamedTuple):
    """A backend and a strategy."""

    backend: str
    strategy: str

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.backend}-{self.strategy}"

    def changes(self, cfg: Config) -> Sequence[str]:
        """The overrides of the user's config; fields that only other strategies have are reset."""
        return strategy_changes(cfg, self.backend, self.strategy)

    def as_json(self) -> dict[str, Any]:
        """What it is."""
        return self._asdict()

    def __str__(self) -> str:
        return f"{self.backend} {self.strategy}"


def candidates_of(cfg: Config, backends: str | None, strategies: str | None) -> list[Variant]:
    """Every combination, in the order given; without one, all installed backends, the config's own first, and the
    config's own strategy.

    Args:
        cfg: The config.
        backends: Names with commas between them.
        strategies: The same.

    Raises:
        ConfigError: A name is unknown.
    """
    wanted = strategies_of(strategies) or [cfg.sharding.strategy]
    return list(
        dict.fromkeys(Variant(backend, strategy) for backend in backends_of(cfg, backends) for strategy in wanted)
    )


def backends_of(cfg: Config, names: str | None) -> list[str]:
    """The engines of a list with commas; without one all that are installed, the config's own first.

    Raises:
        ConfigError: A name is unknown.
    """
    installed = sorted(registry.available())
    backends = _words(names) or [cfg.backend, *(name for name in installed if name != cfg.backend)]
    unknown = [name for name in backends if name not in installed]
    if unknown:
        raise ConfigError(
            [Problem("--backends", f"{name!r} is unknown; write {' or '.join(installed)}") for name in unknown]
        )
    return backends


def strategies_of(names: str | None) -> list[str]:
    """The strategies of a list with commas, in any spelling that a config may have; none without one.

    Raises:
        ConfigError: A name is unknown.
    """
    return list(map(_strategy, _words(names)))


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").replace(",", " ").split() if word]


def _strategy(word: str) -> str:
    """The strategy's own name, of any spelling that a config may have."""
    try:
        return load({"sharding": {"strategy": word}}).sharding.strategy
    except ConfigError as error:
        raise ConfigError([Problem("--strategies", problem.what) for problem in error.problems]) from None


def overrides_of(
    cfg: Config, candidate: ComparedRow, folder: Path, changes: Sequence[str], module_steps: Sequence[int] = ()
) -> list[str]:
    """The overrides of a candidate's run: it logs each step to `folder`, and saves and traces nothing outside it.

    Args:
        cfg: The config.
        candidate: What differs from it.
        folder: Of the run, absolute.
        changes: The user's overrides.
        module_steps: Steps in which each module is measured.
    """
    return [*changes, *_own(cfg, candidate, folder, module_steps)]


def _own(cfg: Config, candidate: ComparedRow, folder: Path, module_steps: Sequence[int]) -> Iterator[str]:
    yield from candidate.changes(cfg)
    measured = {"module_steps": list(module_steps)} if module_steps else {}
    yield "logging=" + json.dumps({"to": ["jsonl"], "every_steps": 1, "dir": str(folder), **measured})
    if cfg.checkpoint.changed:
        yield "checkpoint=" + json.dumps({"dir": str(folder / "checkpoints")} if cfg.checkpoint.dir else {})
    if cfg.profile.changed:
        yield "profile={}"
    launch = {"processes_per_node": cfg.launch.processes_per_node, "environment": dict(cfg.launch.environment)}
    yield "launch=" + json.dumps(launch)
