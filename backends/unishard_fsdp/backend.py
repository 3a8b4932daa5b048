"""The backend object. Stateless; only `build` imports torch.

The models of the native config are imported when one is made: what another tool's FSDP arguments say is read without
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unishard.config import Config
from unishard.config.nested import merge, nested
from unishard.config.shard_groups import shard_group_size
from unishard.config.topology import Topology
from unishard.contract.report import Line, Report, Translation, apply
from unishard_fsdp.rules import RULES

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

_ENGINES = {
    "fully_shard": "FSDPModule",
    "replicate": "FSDPModule",
    "DistributedDataParallel": "DistributedDataParallel",
}


class FSDPBackend:
    """Translates to, and builds, PyTorch's own data parallelism."""

    name = "fsdp"
    requires: Mapping[str, str] = {"torch": "torch"}
    tested: Mapping[str, Sequence[str]] = {"torch": ("2.11", "2.12", "2.13", "2.14", "2.15")}
    rules = RULES
    averages_over_holders = True

    @property
    def constants(self) -> Mapping[str, tuple[Any, str]]:
        """Arguments that are written whatever the config says."""
        from unishard_fsdp.options import CONSTANTS

        return CONSTANTS

    @property
    def private_api(self) -> Mapping[str, PrivateApi]:
        """The private names of the engine that rare cases need."""
        from unishard_fsdp.private import PRIVATE_API

        return PRIVATE_API

    def translate(self, cfg: Config, topology: Topology) -> Translation:
        """The arguments of `fully_shard`, `replicate` or DistributedDataParallel as data, and the report. Pure.

        Raises:
            ConfigError: `native.fsdp` has a key that does not exist, does not apply to this form, or is set by a config
                field.
        """
        from unishard_fsdp import native, options

        decided, report = apply(RULES, cfg, topology)
        written = merge(decided, options.constants_of(decided["data_parallel"]))
        overrides = native.check(cfg, written)
        fits = {key: (value, *native.fit(key, value, written)) for key, value in overrides.items()}
        lines = [Line(f"native.fsdp.{key}", value, fit, key, note) for key, (value, fit, note) in fits.items()]
        return Translation(
            backend=self.name,
            engine=_ENGINES[decided["data_parallel"]],
            native=merge(written, nested(overrides)),
            report=Report((*report, *lines)),
        )

    def require(self, cfg: Config, translation: Translation) -> None:
        """Check that this torch has the native settings. Imports torch only for one that not every tested version has.

        Raises:
            BackendError: One needs a newer torch.
        """
        native = translation.native
        if native.get("reduce_scatter_unused_params"):
            from unishard_fsdp.build import require_unused_params

            require_unused_params()
        from unishard_fsdp.options import COLLECTIVE_SETTINGS

        if any(native.get(key) for key in COLLECTIVE_SETTINGS):
            from unishard_fsdp.sharding import collective_settings

            collective_settings.require(native)

    @property
    def checkpoint_formats(self) -> Mapping[str, CheckpointFormat]:
        """Checkpoint formats of torch.distributed.checkpoint and of Accelerate."""
        from unishard_fsdp.checkpoints import FORMATS

        return FORMATS

    def footprint(self, shape: ModelShape, cfg: Config, topology: Topology) -> Footprint:
        """What one rank holds and sends in an optimizer step. Pure.

        Raises:
            ConfigError: As `translate`.
        """
        from unishard_fsdp.footprint.of_rank import footprint_of

        found = footprint_of(shape, cfg, topology, self.translate(cfg, topology).native)
        return found.in_files(cfg)

    def layout(
        self, shape: ModelShape, cfg: Config, topology: Topology, groups: Sequence[Sequence[str]]
    ) -> Mapping[str, Layout]:
        """Which rows of each parameter each rank holds. Pure."""
        from unishard_fsdp.footprint.rows import layout_of

        return layout_of(shape, shard_group_size(cfg, topology))

    def spec(
        self, cfg: Config, translation: Translation, topology: Topology, shape: ModelShape, units: ModelUnits
    ) -> EngineSpec:
        """The arguments, checked. Pure."""
        from unishard_fsdp.spec import spec_of

        return spec_of(cfg, translation, shape)

    def build(self, model: nn.Module, plan: RunPlan) -> ShardedModel:
        """Shard the model as the plan says and put an adapter around its engine. Imports torch. Collective.

        Raises:
            ModelError: torch cannot shard this model.
        """
        from unishard_fsdp.build import build

        return build(model, plan)
