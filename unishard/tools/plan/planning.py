"""A whole plan: every engine and strategy, the peak of each, what travels, and a recommendation.

Imports no torch itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.footprint import Bytes
from unishard.contract.model_shape import ModelShape
from unishard.errors import ConfigError, ModelError
from unishard.tools.plan import questions
from unishard.tools.plan.activations import Activations, Exchanged
from unishard.tools.plan.candidates import Candidate, candidate_of, candidates_of, wire_of
from unishard.tools.plan.devices import Device


class Model(Protocol):
    """What a plan asks of a model: `unishard.tools.plan.model.PlannedModel`."""

    @property
    def name(self) -> str:
        """On the command line."""
        ...

    @property
    def shape(self) -> ModelShape:
        """Its shape."""
        ...

    def activations(self, micro_batch_size: int, seq_len: int, recomputation: str | list[str]) -> Activations:
        """Those of a micro-batch."""
        ...

    def configured(self, cfg: Config) -> Model:
        """The same with another config."""
        ...


@dataclass(frozen=True)
class Answers:
    """What the config's engine and strategy could do on the device."""

    micro_batch_size: int
    """The largest that fits, 0 if none does."""
    seq_len: int
    """The longest that fits."""
    ranks: int | None
    """The fewest on which it fits; None if it never does."""
    parallel: Mapping[str, int]
    """Where it does not fit: the smallest sizes of `tensor` and `expert`, each by itself, with which it does."""


@dataclass(frozen=True)
class Plan:
    """Everything that `unishard plan` shows."""

    model: str
    shape: ModelShape
    cfg: Config
    topology: Topology
    device: Device | None
    seq_len: int
    candidates: Sequence[Candidate]
    activations: Mapping[str, Activations]
    """By `activation_checkpointing`, the config's own first; empty if they are not known."""
    note: str = ""
    """Why activations are not known."""
    recommendation: questions.Recommendation | None = None
    """None without a device."""
    answers: Answers | None = None
    disk_speed: int | None = None
    """Bytes that the disk of a node reads in a second, and writes, if it is known."""

    def disk_seconds(self, candidate: Candidate) -> float | None:
        """The least time of an update on the disk, which the ranks of a node share; None if its speed is not known.

        It reads the optimizer's state, and at the same time writes it.
        """
        if self.disk_speed is None or candidate.footprint is None:
            return None
        return candidate.footprint.optimizer.files * self.topology.local_world_size / self.disk_speed

    @property
    def exchanged(self) -> tuple[Exchanged, ...]:
        """What ranks that have samples, layers or experts together send each other in a step."""
        own = next(iter(self.activations.values()), None)
        return own.exchanged_in(self.cfg.training.gradient_accumulation_steps) if own else ()

    @property
    def own(self) -> Candidate:
        """The candidate that the config names."""
        wanted = (self.cfg.backend, self.cfg.sharding.strategy)
        return next(candidate for candidate in self.candidates if (candidate.backend, candidate.strategy) == wanted)

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        shape, topology = self.shape, self.topology
        return {
            "model": {
                "name": self.model,
                "parameters": sum(parameter.full_numel for parameter in shape.parameters),
                "trainable": sum(parameter.full_numel for parameter in shape.trainable),
                "units": len(shape.units),
            },
            "world_size": topology.world_size,
            "gpus_per_node": topology.local_world_size,
            "device": self.device and {"name": self.device.name, "memory": self.device.memory},
            "micro_batch_size": self.cfg.training.micro_batch_size,
            "seq_len": self.seq_len,
            "activations": {word: activations.peak for word, activations in self.activations.items()} or None,
            "activations_on_host": max((each.on_host for each in self.activations.values()), default=0),
            "exchanged": [each._asdict() for each in self.exchanged],
            "candidates": [self._candidate(candidate) for candidate in self.candidates],
            "recommendation": self.recommendation
            and {"changes": list(self.recommendation.changes), "reason": self.recommendation.reason},
            "answers": self.answers
            and {
                "micro_batch_size": self.answers.micro_batch_size,
                "seq_len": self.answers.seq_len,
                "ranks": self.answers.ranks,
                "parallel": dict(self.answers.parallel),
            },
            "notes": [self.note] if self.note else [],
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "backend": candidate.backend,
            "strategy": candidate.strategy,
            "refusal": candidate.refusal or None,
        }
        if candidate.footprint is None or candidate.peak is None:
            return entry
        footprint = candidate.footprint
        sizes: Mapping[str, Bytes] = {**footprint.parts, "persistent": footprint.persistent}
        entry["bytes"] = {name.replace(" ", "_"): size._asdict() for name, size in sizes.items()}
        entry["bytes"]["gathered"] = footprint.gathered
        entry["bytes"]["activations"] = candidate.activations
        entry["peak"] = {"bytes": candidate.peak.nbytes, "phase": candidate.peak.phase, "module": candidate.peak.module}
        entry["reserved"] = list(candidate.reserved)
        entry["approximate"] = list(candidate.approximate)
        if self.disk_speed is not None:
            entry["disk_seconds"] = self.disk_seconds(candidate)
        if self.device is not None:
            entry["fits"] = candidate.fits(self.device.memory)
            entry["wire"] = wire_of(footprint, self.topology, self.device)._asdict()
        return entry


def make_plan(
    cfg: Config,
    model: Model,
    topology: Topology,
    device: Device | None,
    *,
    seq_len: int,
    activations: bool = True,
    answers: bool = True,
    disk_speed: int | None = None,
) -> Plan:
    """Plan a config.

    Args:
        cfg: The config.
        model: The model.
        topology: The ranks.
        device: What they run on; None for a plan without a verdict.
        seq_len: Tokens of a sample.
        activations: Whether to run a micro-batch of the model without data.
        answers: Whether to answer the inverse questions, which takes a few more micro-batches.
        disk_speed: Of a node's disk for `offload` with `nvme`, in bytes a second.

    Raises:
        ConfigError: The model cannot be built.
        ModelError: It cannot be run, or not without data.
    """
    shape, micro = model.shape, cfg.training.micro_batch_size
    recomputation = cfg.activation_checkpointing
    own_word = recomputation if isinstance(recomputation, str) else ", ".join(recomputation)
    sharing = cfg.parallel.sequence.size
    part = -(-seq_len // sharing)  # what a rank has of a sample
    traced: dict[str, Activations] = {}
    note = ""
    if activations:
        traced[own_word] = model.activations(micro, part, recomputation)
        for word in questions.recomputations_of(cfg):
            if word not in traced:
                try:
                    traced[word] = model.activations(micro, part, word)
                except ModelError as error:
                    note = f"activation_checkpointing {word} is left out: {error}"
    else:
        together = ", and what ranks of a group send each other" if cfg.parallel.on else ""
        note = f"activations are left out{together}"

    def planned(word: str) -> list[Candidate]:
        found = candidates_of(cfg, shape, topology, traced.get(word))
        sent = traced[word].exchanged_in(cfg.training.gradient_accumulation_steps) if word in traced else ()
        return [candidate.sending(each.collective for each in sent) for candidate in found]

    candidates = planned(own_word)
    plan = Plan(model.name, shape, cfg, topology, device, seq_len, candidates, traced, note, disk_speed=disk_speed)
    if device is None:
        return plan
    levels: list[tuple[str, Sequence[Candidate]]] = [(own_word, candidates)]
    cheaper = (
        questions.RECOMPUTATIONS.index(own_word) + 1
        if own_word in questions.RECOMPUTATIONS
        else len(questions.RECOMPUTATIONS)
    )
    levels += [(word, planned(word)) for word in questions.RECOMPUTATIONS[cheaper:] if word in traced]
    found = questions.recommend(levels, topology, device, plan.own, traced=bool(traced))
    recommendation = questions.with_compilation(found, cfg, shape, device)
    answered = (
        _answers(plan, model, recomputation, device) if answers and traced and plan.own.footprint is not None else None
    )
    return replace(plan, recommendation=recommendation, answers=answered)


def _answers(plan: Plan, model: Model, recomputation: str | list[str], device: Device) -> Answers:
    cfg, configured, micro = plan.cfg, plan.own, plan.cfg.training.micro_batch_size

    sharing, chunk = cfg.parallel.sequence.size, cfg.training.loss_chunk_tokens or 1

    def trace(micro_batch_size: int, part: int) -> Activations:
        return model.activations(micro_batch_size, part, recomputation)

    activations = next(iter(plan.activations.values()))
    return Answers(
        questions.largest_micro_batch(configured, plan.shape, device.memory, trace, -(-plan.seq_len // sharing), chunk),
        sharing * questions.largest_seq_len(configured, plan.shape, device.memory, trace, micro, chunk),
        questions.gpus_needed(
            cfg,
            plan.shape,
            activations,
            configured.backend,
            configured.strategy,
            device.memory,
            plan.topology.local_world_size,
        ),
        {} if configured.fits(device.memory) else dict(_degrees(plan, model, recomputation, device)),
    )


def _degrees(plan: Plan, model: Model, recomputation: str | list[str], device: Device) -> Iterator[tuple[str, int]]:
    """The fields of `parallel` that cut weights, with the smallest size with which the config fits."""
    cfg = plan.cfg
    part = -(-plan.seq_len // cfg.parallel.sequence.size)

    def fits(field: str, size: int) -> bool:
        cut = cfg.override(f"parallel.{field}.size={size}")
        rank = model.configured(cut)

        def beside(activations: Activations | None) -> bool:
            found = candidate_of(cut, rank.shape, plan.topology, activations, cfg.backend, cfg.sharding.strategy)
            return found.fits(device.memory)

        return beside(None) and beside(rank.activations(cfg.training.micro_batch_size, part, recomputation))

    for field in ("tensor", "expert"):
        size = getattr(cfg.parallel, field).size
        try:
            while (size := 2 * size) <= plan.topology.local_world_size:
                if fits(field, size):
                    yield field, size
                    break
        except (ConfigError, ModelError):  # no plan, or heads or experts that the next size does not divide either
            continue
