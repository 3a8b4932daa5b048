"""The protocol between the core and a backend.

A backend's author implements it, and an adapter, and runs `unishard.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.footprint import Footprint
from unishard.contract.model_shape import ModelShape
from unishard.contract.report import Translation
from unishard.contract.rules import Rule
from unishard.distributed.layout import Layout, whole

if TYPE_CHECKING:
    from torch import nn

    from unishard.contract.adapter import ShardedModel
    from unishard.contract.checkpoint_format import CheckpointFormat
    from unishard.contract.plan import EngineSpec, RunPlan
    from unishard.contract.private_api import PrivateApi
    from unishard.contract.units import ModelUnits


OptimizerFactory = Callable[[Iterable[Any]], Any]
"""Builds a `torch.optim.Optimizer` from the trainable parameters that the engine hands it."""

OptimizerBuilder = Callable[[Iterable[tuple[str, Any]]], Any]
"""What a backend is given: builds a `torch.optim.Optimizer` from pairs of name and trainable parameter, all of them, as
`model.named_parameters()` yields them; the names are those of the model before it was sharded."""


@runtime_checkable
class Backend(Protocol):
    """An engine's translator and builder. Stateless; importing it needs neither torch nor the engine.

    A subclass may leave out `private_api`, `averages_over_holders`, `constants`, `require` and `checkpoint_formats`.
    """

    @property
    def name(self) -> str:
        """The word in `backend:`."""
        ...

    @property
    def requires(self) -> Mapping[str, str]:
        """Import name of each package that `build` needs, to the extra that brings it:
        `{"deepspeed": "deepspeed"}`.
        """
        ...

    @property
    def tested(self) -> Mapping[str, Sequence[str]]:
        """Versions that were tested, oldest first, by the name of each package that decides how it trains:
        `{"torch": ("2.11", "2.12")}`.

        A version counts as tested if it begins with one of them, number by number: 2.11.1 with 2.11.
        """
        ...

    @property
    def private_api(self) -> Mapping[str, PrivateApi]:
        """The private names of the engine that rare cases need, by the short name of the case. Imports no engine."""
        return {}

    @property
    def averages_over_holders(self) -> bool:
        """Whether the engine averages the gradient of a slice (`unishard.distributed.slices`) over its holders; if
        not, it divides the sum over its holders by the number of all ranks.
        """
        return True

    @property
    def rules(self) -> Mapping[str, Rule]:
        """One row for each leaf of `Config`, in its order."""
        ...

    @property
    def constants(self) -> Mapping[str, tuple[Any, str]]:
        """Dotted native keys that are written whatever the config says: `(value, why)`."""
        return {}

    def translate(self, cfg: Config, topology: Topology) -> Translation:
        """The native config and the report. Pure.

        Raises:
            ConfigError: `native.<name>` holds a key that the engine does not know, or one that a field decides.
        """
        ...

    def require(self, cfg: Config, translation: Translation) -> None:
        """Check that this machine can run a config, for `unishard check`; `prepare` checks it, too.

        May import the engine.

        Raises:
            BackendError: The engine is too old, or lacks something that the config needs.
        """

    @property
    def checkpoint_formats(self) -> Mapping[str, CheckpointFormat]:
        """Checkpoint directories of the engine's own, by the word after `--from` and `--to` of
        `unishard checkpoint convert`.
        """
        return {}

    def footprint(self, shape: ModelShape, cfg: Config, topology: Topology) -> Footprint:
        """What one rank holds and sends in an optimizer step. Pure.

        Bytes of the persistent state are exact for the optimizer of the config: `unishard plan` shows them, and
        `prepare` can compare them with what is held.

        Args:
            shape: The model.
            cfg: What to run.
            topology: The ranks, and which of them this is.

        Raises:
            ConfigError: As `translate`; or a pattern of the section `optimizer` matches no parameter.
        """
        ...

    def layout(
        self, shape: ModelShape, cfg: Config, topology: Topology, groups: Sequence[Sequence[str]]
    ) -> Mapping[str, Layout]:
        """Which elements of each parameter's master weight, or of a frozen parameter, each rank holds: by name. Pure.

        By default, every rank holds all of each. `prepare` compares it with what the engine holds.

        Args:
            shape: The model.
            cfg: What to run.
            topology: The ranks.
            groups: Names of the trainable parameters in each group of the optimizer; of inference, none.
        """
        return {each.name: whole(each.numel) for each in shape.parameters}

    def spec(
        self, cfg: Config, translation: Translation, topology: Topology, shape: ModelShape, units: ModelUnits
    ) -> EngineSpec:
        """What the engine of a model is built from: what `translate` made, with what the model and the machine add.

        Pure.

        Args:
            cfg: What to run.
            translation: What `translate` made of it.
            topology: The ranks.
            shape: The model.
            units: What is gathered together, what casts its inputs, and what a rank may skip.
        """
        ...

    def build(self, model: nn.Module, plan: RunPlan) -> ShardedModel:
        """Shard the model and put an adapter around its engine. Imports the engine. Collective.

        Args:
            model: Full, on any device, trainable parameters in `precision.master`; they may differ between ranks (rank
                0's count). They may be on the meta device, on rank 0 too: `unishard.contract.kit.materialization` gives
                them their data.
            plan: Its `engine` is what `spec` made. Without an optimizer the model is only evaluated, which is asked for
                where the strategy shards parameters, which are then to be frozen and cast to `precision.compute`.

        Returns:
            The model with its `updates`; without them if there is no optimizer.
        """
        ...
