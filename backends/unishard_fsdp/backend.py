"""The backend object. Stateless; only `prepare` imports torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unishard.config import Config
from unishard.config.nested import merge, nested
from unishard.config.topology import Topology
from unishard.mapping.entries import Entry, Key
from unishard.mapping.express import Expressed
from unishard.mapping.report import Line, Report, Translation, apply
from unishard.mapping.rules import Rule
from unishard.patches import Patch
from unishard.plugins.backend import OptimizerBuilder
from unishard_fsdp import arguments, native, options
from unishard_fsdp.expressions import EXPRESSIONS
from unishard_fsdp.keys import KEYS
from unishard_fsdp.patches import PATCHES
from unishard_fsdp.rules import RULES

if TYPE_CHECKING:
    from torch import nn

    from unishard.checkpoint.formats import CheckpointFormat
    from unishard.engine.adapter import InferenceAdapter
    from unishard.engine.model.units import ModelUnits

__all__ = ["FSDPBackend"]

_ENGINES = {"fully_shard": "FSDPModule", "replicate": "FSDPModule", "DistributedDataParallel": "DistributedDataParallel"}


class FSDPBackend:
    """Translates to, and builds, PyTorch's own data parallelism."""

    @property
    def name(self) -> str:
        """The word in `backend:`."""
        return "fsdp"

    @property
    def requires(self) -> Mapping[str, str]:
        """Import name of each package that `prepare` needs, to the extra that brings it."""
        return {"torch": "torch"}

    @property
    def tested(self) -> Mapping[str, Sequence[str]]:
        """Versions that the suite was run on; see docs/versions.md."""
        return {"torch": ("2.11", "2.12", "2.13", "2.14", "2.15")}

    @property
    def patches(self) -> Mapping[str, Patch]:
        """The private names that rare cases need."""
        return PATCHES

    @property
    def rules(self) -> Mapping[str, Rule]:
        """One row for each leaf of the config."""
        return RULES

    @property
    def constants(self) -> Mapping[str, tuple[Any, str]]:
        """Native keys that are always written, in the forms that have them: `(value, why)`."""
        return options.CONSTANTS

    def translate(self, cfg: Config, topology: Topology) -> Translation:
        """The arguments of `fully_shard`, `replicate` or DistributedDataParallel as data, and the report. Pure.

        Raises:
            ConfigError: `native.fsdp` has a key that does not exist, does not apply to this form, or is set by a config field.
        """
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

    @property
    def keys(self) -> Mapping[str, Key]:
        """FSDP's own arguments, of versions 1 and 2, and the config fields that they set."""
        return KEYS

    @property
    def expressions(self) -> Mapping[str, Rule]:
        """How a training script without unishard sets each field with FSDP2."""
        return EXPRESSIONS

    def parse(
        self, native: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, topology: Topology | None = None
    ) -> list[Entry]:
        """Interpret FSDP's own arguments, one entry for each. Pure."""
        return arguments.parse(native, defaults=defaults, topology=topology)

    def arguments(self, cfg: Config, topology: Topology, undecided: Collection[str] = frozenset()) -> Expressed:
        """FSDP2's arguments for the same training. Pure."""
        return arguments.arguments(cfg, topology, undecided)

    @property
    def checkpoint_formats(self) -> Mapping[str, CheckpointFormat]:
        """Checkpoint formats of torch.distributed.checkpoint and of Accelerate."""
        from unishard_fsdp.checkpoints import FORMATS

        return FORMATS

    def prepare(
        self,
        model: nn.Module,
        cfg: Config,
        translation: Translation,
        topology: Topology,
        units: ModelUnits,
        optimizer: OptimizerBuilder | None,
    ) -> InferenceAdapter:
        """Shard the model as `translation.native` says and put an adapter around its engine. Imports torch. Collective.

        Raises:
            ModelError: torch cannot shard this model.
        """
        from unishard_fsdp import build

        return build.build(model, cfg, options.parse(translation.native), topology, units, optimizer)
