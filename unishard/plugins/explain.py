"""Every effective value of a config: what it is, where it came from, and what it becomes on each backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unishard.config import Config, leaves, value_at
from unishard.config.describe import bare
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.loading import Origins
from unishard.mapping.rules import Fit
from unishard.plugins import registry
from unishard.plugins.translate import check_batch, translate

__all__ = ["Image", "Row", "explain"]


@dataclass(frozen=True, slots=True)
class Image:
    """What one field becomes on one backend."""

    fit: Fit
    native: str
    """The settings that are written, such as `zero_optimization.stage = 3`; where none are, who honours the field."""
    note: str


@dataclass(frozen=True, slots=True)
class Row:
    """One field, or one value that is computed."""

    path: str
    value: Any
    origin: str
    """`file:line`, `override`, `given`, `default` or `computed`."""
    images: Mapping[str, Image]
    """By backend; empty for a computed value."""


def explain(cfg: Config, origins: Origins, topology: Topology | None = None) -> list[Row]:
    """Explain a config on every installed backend, in the order of the schema.

    Raises:
        ConfigError: The config contradicts the number of ranks, or a backend refuses a key of `native`.
    """
    topology = topology or Topology()
    computed = {"training.global_batch_size": check_batch(cfg, topology.world_size)}
    reports = {name: list(translate(cfg, backend=name, topology=topology).report) for name in registry.available()}
    rows = []
    for path, _ in leaves(Config):
        value, origin = value_at(cfg, path), origins.describe(cfg, path)
        if value is None and path in computed:
            value, origin = computed[path], f"computed for {topology.world_size} {'rank' if topology.world_size == 1 else 'ranks'}"
        rows.append(Row(path, value, origin, {name: _image(name, path, cfg, topology) for name in reports}))
    known = {row.path for row in rows}
    for name, lines in reports.items():
        rows += [
            Row(line.path, line.value, origins.describe(cfg, "native"), {name: Image(line.fit, line.native, line.note)})
            for line in lines
            if line.path not in known
        ]
    return rows


def _image(name: str, path: str, cfg: Config, topology: Topology) -> Image:
    rule = registry.get(name).rules[path]
    fit, note = rule.outcome(cfg)
    settings = {} if fit is Fit.UNSUPPORTED else dict(flat(rule.to(cfg, topology)))
    return Image(fit, ", ".join(f"{key} = {bare(value)}" for key, value in settings.items()) or rule.key, note)
