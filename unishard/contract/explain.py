"""Explain each value of a config: its origin, and its translation for each backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unishard.config import Config, leaves, value_at
from unishard.config.batch_sizes import check_batch
from unishard.config.data_share import data_share_of
from unishard.config.describe import bare
from unishard.config.loading import Origins
from unishard.config.nested import flat
from unishard.config.topology import Topology
from unishard.config.unused import why_unused
from unishard.contract import registry
from unishard.contract.rules import Fit
from unishard.contract.translate import translate

_NULL_IS_ON = frozenset({"sharding.group_size"})
"""Fields whose `null` stands for a value."""


@dataclass(frozen=True, slots=True)
class Image:
    """The translation of one field for one backend."""

    fit: Fit
    native: str
    """The settings written, such as `zero_optimization.stage = 3`; if there are none, what implements the field, or
    that it is off."""
    note: str
    off: bool = False
    """Whether the field is off, or decides nothing under this config."""

    @property
    def has_note(self) -> bool:
        """Whether the note says how a setting differs."""
        return self.fit is not Fit.EXACT and not self.off


@dataclass(frozen=True, slots=True)
class ExplainedField:
    """One field, or one computed value."""

    path: str
    value: Any
    origin: str
    """`file:line`, `override`, `given`, `default` or `computed`."""
    images: Mapping[str, Image]
    """By backend; empty for a computed value."""
    follows: frozenset[str] = frozenset()
    """Backends on which a value that is not set, or what becomes of it, follows from what is set: it is not that of an
    empty file."""

    @property
    def is_set(self) -> bool:
        """Whether the file or an override sets the field."""
        return self.origin != "default" and not self.origin.startswith("computed ")


def explain(cfg: Config, origins: Origins, topology: Topology | None = None) -> list[ExplainedField]:
    """Explain a config for every installed backend, in schema order.

    Raises:
        ConfigError: The config contradicts the number of ranks, or a backend rejects a key of `native`.
    """
    topology = topology or Topology()
    computed = {"training.global_batch_size": check_batch(cfg.training, data_share_of(cfg, topology).of)}
    reports = {name: list(translate(cfg, backend=name, topology=topology).report) for name in registry.available()}
    empty = Config.model_validate({"backend": cfg.backend})
    rows = []
    for path, _ in leaves(Config):
        value, origin = value_at(cfg, path), origins.describe(cfg, path)
        if value is None and path in computed:
            value, origin = (
                computed[path],
                f"computed for {topology.world_size} {'rank' if topology.world_size == 1 else 'ranks'}",
            )
        images = {name: _image(name, path, cfg, topology, value) for name in reports}
        row = ExplainedField(path, value, origin, images)
        rows.append(row if row.is_set else replace(row, follows=_follows(row, empty, topology)))
    known = {row.path for row in rows}
    for name, lines in reports.items():
        rows += [
            ExplainedField(
                line.path, line.value, origins.describe(cfg, "native"), {name: Image(line.fit, line.native, line.note)}
            )
            for line in lines
            if line.path not in known
        ]
    return rows


def _follows(row: ExplainedField, empty: Config, topology: Topology) -> frozenset[str]:
    if row.origin != "default":
        return frozenset(row.images)
    path, plain = row.path, value_at(empty, row.path)
    shown = {name: image for name, image in row.images.items() if not image.off}
    return frozenset(name for name, image in shown.items() if image != _image(name, path, empty, topology, plain))


def _image(name: str, path: str, cfg: Config, topology: Topology, value: Any) -> Image:
    rule = registry.get(name).rules[path]
    fit, note = rule.outcome(path, cfg)
    settings = {} if fit is Fit.UNSUPPORTED else dict(flat(rule.to(cfg, topology)))
    if idle := why_unused(cfg, path):
        return Image(fit, f"unused: {idle}", note, off=True)
    if settings:
        return Image(fit, ", ".join(f"{key} = {bare(value)}" for key, value in settings.items()), note)
    if fit is Fit.EXACT and path not in _NULL_IS_ON and (value is None or value is False or value in ("none", [], {})):
        return Image(fit, "off", note, off=True)
    return Image(fit, rule.key, note)
