"""The core of the plan: what each engine and strategy needs. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unishard.config import Config, value_at
from unishard.config.describe import bare
from unishard.config.section import needs_of
from unishard.config.sharding import GATHERING
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.contract.footprint import Collective, Footprint, with_slices
from unishard.contract.model_shape import ModelShape
from unishard.contract.rules import Fit
from unishard.contract.translate import translate
from unishard.errors import BackendError, ConfigError
from unishard.tools.plan.activations import Activations, Segment
from unishard.tools.plan.devices import Device

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard_grad_op", "hybrid_shard")
_DEFAULTS = Config.model_construct()


class Peak(NamedTuple):
    """The most bytes that tensors take on the device at once, and when."""

    nbytes: int
    phase: str
    """`forward`, `backward` or `step`."""
    module: str
    """The module that computes then; empty for what the root computes itself, such as the loss, and for the step."""

    @property
    def where(self) -> str:
        """In words."""
        if self.phase == "step":
            return "step"
        return f"{self.phase} of {self.module or 'the root'}"


class Wire(NamedTuple):
    """What one rank sends in an optimizer step."""

    within: int
    """Bytes to ranks of its node."""
    between: int
    """Bytes to other nodes."""
    seconds: float
    """The time these need alone at a device's bandwidths; engines overlap most of it with compute."""


@dataclass(frozen=True)
class Candidate:
    """An engine and a strategy for a config."""

    backend: str
    strategy: str
    cfg: Config | None
    """The config with both; None if it is refused."""
    footprint: Footprint | None
    peak: Peak | None
    activations: int
    """Bytes of activations that are alive at the peak, or at their own if the peak is in the step."""
    refusal: str = ""
    """Why this engine cannot run it."""
    approximate: tuple[str, ...] = ()
    """Fields that the engine only approximates."""

    def sending(self, more: Iterable[Collective]) -> Candidate:
        """It with more traffic."""
        if self.footprint is None:
            return self
        return replace(self, footprint=replace(self.footprint, traffic=(*self.footprint.traffic, *more)))

    @property
    def reserved(self) -> tuple[int, int]:
        """Bytes that the allocator takes from the device: from, to."""
        if self.peak is None or self.footprint is None:
            return 0, 0
        low, high = self.footprint.reserved
        return int(self.peak.nbytes * low), int(self.peak.nbytes * high)

    def fits(self, memory: int, *, surely: bool = False) -> bool:
        """Whether the peak fits, with the least that the allocator adds.

        Args:
            memory: Bytes of the device.
            surely: Also with the most that it adds.
        """
        return self.peak is not None and self.reserved[surely] <= memory


def candidates_of(
    cfg: Config,
    shape: ModelShape,
    topology: Topology,
    activations: Activations | None = None,
    *,
    backends: Sequence[str] | None = None,
    strategies: Sequence[str] | None = None,
) -> list[Candidate]:
    """Plan each engine and strategy.

    Args:
        cfg: The config; its backend and strategy are those of one candidate.
        shape: The model.
        topology: The ranks.
        activations: Of one micro-batch; None for a plan without them.
        backends: Engines; by default the installed ones.
        strategies: Names of strategies; by default all, those with groups only where there are several.
    """
    if strategies is None:
        strategies = strategies_for(cfg, topology)
    names = (
        list(backends)
        if backends is not None
        else sorted(registry.available(), key=lambda name: (name != cfg.backend, name))
    )
    return [
        candidate_of(cfg, shape, topology, activations, backend, strategy)
        for backend in names
        for strategy in strategies
    ]


def strategies_for(cfg: Config, topology: Topology) -> list[str]:
    """All strategies, those with groups only where there are several groups."""
    group = cfg.sharding.group_size or topology.local_world_size
    several = group < topology.world_size or cfg.sharding.hybrid
    return [name for name in STRATEGIES if several or not name.startswith("hybrid")]


def candidate_of(
    cfg: Config, shape: ModelShape, topology: Topology, activations: Activations | None, backend: str, strategy: str
) -> Candidate:
    """Plan one engine and strategy."""
    try:
        chosen = with_strategy(cfg, backend, strategy)
        translation = translate(chosen, topology=topology).check(strict=chosen.strict)
        footprint = with_slices(registry.get(backend).footprint, shape, chosen, topology)
    except (ConfigError, BackendError) as error:
        text = error.problems[0] if isinstance(error, ConfigError) and error.problems else error
        return Candidate(backend, strategy, None, None, None, 0, refusal=str(text))
    peak, alive = peak_of(footprint, shape, activations)
    approximate = tuple(line.path for line in translation.report if line.fit is Fit.APPROXIMATE)
    return Candidate(backend, strategy, chosen, footprint, peak, alive, approximate=approximate)


def with_strategy(cfg: Config, backend: str, strategy: str) -> Config:
    """A config with another engine and strategy. Fields that only other strategies have are reset.

    Raises:
        ConfigError: The config cannot have them.
    """
    return cfg.override(*changes) if (changes := strategy_changes(cfg, backend, strategy)) else cfg


def strategy_changes(cfg: Config, backend: str, strategy: str) -> list[str]:
    """The overrides that give a config another engine and strategy; none if it has both."""
    if (cfg.backend, cfg.sharding.strategy) == (backend, strategy):
        return []
    return [f"backend={backend}", f"sharding.strategy={strategy}", *_resets(cfg, strategy)]


def _resets(cfg: Config, strategy: str) -> Iterator[str]:
    chosen: dict[str, Any] = {"sharding.strategy": strategy}
    if strategy not in GATHERING:
        chosen["offload.params"] = "none"
    if strategy == "no_shard":
        chosen["offload.optimizer"] = "none"

    def value_of(path: str) -> Any:
        return chosen.get(path, value_at(cfg, path))

    for path, needs in needs_of(Config).items():
        if any(need.refusal and not need.is_met(value_of) for need in needs):
            chosen[path] = value_at(_DEFAULTS, path)
    for path, value in chosen.items():
        if path != "sharding.strategy" and value != value_at(cfg, path):
            yield f"{path}={bare(value)}"


def peak_of(footprint: Footprint, shape: ModelShape, activations: Activations | None) -> tuple[Peak, int]:
    """The peak, and the bytes of activations in it.

    Args:
        footprint: What the engine holds.
        shape: The model, for the names of units.
        activations: Of a micro-batch, if they are known.
    """
    base = footprint.persistent.device
    most = activations.peak if activations else 0
    moments = [(Peak(base + footprint.step, "step", ""), most), (Peak(base + footprint.final, "backward", ""), most)]
    every = activations.segments if activations else _empty(shape)
    for phase, working in (("forward", footprint.forward), ("backward", footprint.backward)):
        segments = [segment for segment in every if segment.phase == phase]
        for number, segment in enumerate(segments):
            beside = working.at(segment.unit, number / len(segments))
            for size, alive in zip(beside, (segment.nbytes, segment.end), strict=True):
                moments.append((Peak(base + size + alive, phase, segment.module), alive))
    return max(moments, key=lambda moment: moment[0].nbytes)


def _empty(shape: ModelShape) -> list[Segment]:
    """A micro-batch without activations."""
    forward = [Segment("forward", name, unit, 0, 0) for unit, name in (*enumerate(shape.units), (-1, ""))]
    return [*forward, *(segment._replace(phase="backward") for segment in reversed(forward))]


def wire_of(footprint: Footprint, topology: Topology, device: Device) -> Wire:
    """Bytes on the wire in a step, and the time for them.

    Args:
        footprint: What the engine sends.
        topology: The ranks and nodes.
        device: Its bandwidths.
    """
    per_node = topology.local_world_size
    within = between = 0
    seconds = 0.0
    for transfer in footprint.traffic:
        out = transfer.between_nodes(per_node)
        inside = transfer.sent() - out
        within, between = within + inside, between + out
        seconds += max(inside / device.within, out / device.between)
    return Wire(within, between, seconds)
