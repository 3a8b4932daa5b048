"""The translator: from a config to the JSON that `deepspeed.initialize` takes. Imports neither torch nor deepspeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unishard.config import Config
from unishard.config.nested import flat, merge, nested
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.report import Line, Report, Translation, apply
from unishard.errors import ConfigError
from unishard_deepspeed import second_copy
from unishard_deepspeed.keys import CONSTANTS
from unishard_deepspeed.native import check, fit
from unishard_deepspeed.rules import RULES

if TYPE_CHECKING:
    from torch import nn

    from unishard.contract.adapter import ShardedModel
    from unishard.contract.checkpoint_format import CheckpointFormat
    from unishard.contract.footprint import Footprint
    from unishard.contract.model_shape import ModelShape
    from unishard.contract.plan import EngineSpec, RunPlan
    from unishard.contract.private_api import PrivateApi
    from unishard.contract.units import ModelUnits
    from unishard.distributed.layout import Layout


class DeepSpeedBackend:
    """Implements `unishard.contract.backend.Backend` for DeepSpeed 0.19.8."""

    name = "deepspeed"
    requires: Mapping[str, str] = {"torch": "torch", "deepspeed": "deepspeed"}
    tested: Mapping[str, Sequence[str]] = {"torch": ("2.11", "2.12", "2.13", "2.14", "2.15"), "deepspeed": ("0.19.8",)}
    rules = RULES
    averages_over_holders = False
    constants = CONSTANTS

    @property
    def private_api(self) -> Mapping[str, PrivateApi]:
        """The private names of the engine that rare cases need."""
        from unishard_deepspeed.private import PRIVATE_API

        return PRIVATE_API

    def translate(self, cfg: Config, topology: Topology) -> Translation:
        """The JSON for `deepspeed.initialize` and the report. Pure.

        Raises:
            ConfigError: `native.deepspeed` holds a key that DeepSpeed does not know, that a field decides, or that
                would break what unishard promises.
        """
        own = cfg.native.get(self.name, {})
        problems = check(own)
        if problems := problems or [*second_copy.second_copy_problems(cfg, own, topology)]:
            raise ConfigError(problems)
        native, report = apply(RULES, cfg, topology)
        fixed = nested({key: value for key, (value, _) in CONSTANTS.items()})
        fits = {key: (value, *fit(key)) for key, value in flat(own)}
        lines = tuple(
            Line(f"native.{self.name}.{key}", value, fit, key, note) for key, (value, fit, note) in fits.items()
        )
        return Translation(self.name, "DeepSpeedEngine", merge(merge(fixed, native), own), Report(report.lines + lines))

    def require(self, cfg: Config, translation: Translation) -> None:
        """Check the version of DeepSpeed, without importing it.

        Raises:
            BackendError: It is too old.
        """
        from unishard_deepspeed.oldest import require_version

        require_version()

    @property
    def checkpoint_formats(self) -> Mapping[str, CheckpointFormat]:
        """What DeepSpeed's own `save_checkpoint` writes, and its Universal Checkpoint."""
        from unishard_deepspeed.checkpoints import FORMATS

        return FORMATS

    def footprint(self, shape: ModelShape, cfg: Config, topology: Topology) -> Footprint:
        """What one rank holds and sends in an optimizer step. Pure.

        Raises:
            ConfigError: As `translate`.
        """
        from unishard_deepspeed.footprint.of_rank import footprint_of

        found = footprint_of(shape, cfg, topology, self.translate(cfg, topology).native)
        return found.in_files(cfg)

    def layout(
        self, shape: ModelShape, cfg: Config, topology: Topology, groups: Sequence[Sequence[str]]
    ) -> Mapping[str, Layout]:
        """Which elements of each master weight each rank holds. Pure."""
        from unishard_deepspeed.footprint.intervals import layout_of

        zero = self.translate(cfg, topology).native["zero_optimization"]
        return layout_of(shape, cfg, shard_group_size(cfg, topology), groups, zero)

    def spec(
        self, cfg: Config, translation: Translation, topology: Topology, shape: ModelShape, units: ModelUnits
    ) -> EngineSpec:
        """The JSON with what the model and the machine add. Pure; imports torch."""
        from unishard_deepspeed.spec import spec_of

        return spec_of(cfg, translation, topology, shape, units)

    def build(self, model: nn.Module, plan: RunPlan) -> ShardedModel:
        """Shard the model and put an adapter around its engine. Imports DeepSpeed. Collective."""
        from unishard_deepspeed.build import build

        return build(model, plan)
