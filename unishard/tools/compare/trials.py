"""What `unishard tune` measures: engines, strategies, recomputation and micro-batches that fit, by the plan. Pure.

The samples of an update stay those of the config: a smaller micro-batch comes with more accumulation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from unishard.config import Config, value_at
from unishard.config.describe import bare
from unishard.config.topology import Topology
from unishard.contract.footprint import ModelShape
from unishard.contract.report import translate
from unishard.errors import BackendError, ConfigError, ModelError
from unishard.tools.plan.activations import Activations
from unishard.tools.plan.candidates import Candidate, candidate_of, strategy_changes, wire_of
from unishard.tools.plan.devices import Device, with_unit
from unishard.tools.plan.model import PlannedModel
from unishard.tools.plan.questions import RECOMPUTATIONS, by_micro_batch

Recomputation = str | tuple[str, ...]
"""`activation_checkpointing`."""


class Trial(NamedTuple):
    """One config to measure."""

    backend: str
    strategy: str
    recomputation: Recomputation
    micro_batch_size: int
    accumulation: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.backend}-{self.strategy}-{self._word}-{self.micro_batch_size}x{self.accumulation}".replace(
            " ", ""
        )

    @property
    def _word(self) -> str:
        return self.recomputation if isinstance(self.recomputation, str) else ",".join(self.recomputation)

    def changes(self, cfg: Config) -> list[str]:
        """The overrides that differ from a config, as for `unishard set`."""
        changes = [
            change for change in strategy_changes(cfg, self.backend, self.strategy) if not _says_nothing(cfg, change)
        ]
        if _own_word(cfg) != self.recomputation:
            changes.append(f"activation_checkpointing={json.dumps(self.recomputation)}")
        for name, value in (
            ("micro_batch_size", self.micro_batch_size),
            ("gradient_accumulation_steps", self.accumulation),
        ):
            if getattr(cfg.training, name) != value:
                changes.append(f"training.{name}={value}")
        return changes

    def as_json(self) -> dict[str, Any]:
        """What it is."""
        return self._asdict()

    def __str__(self) -> str:
        return f"{self.backend} {self.strategy}, {self._word}, {self.micro_batch_size} x {self.accumulation}"


class Dropped(NamedTuple):
    """A trial that is not measured."""

    trial: Trial
    reason: str
    nbytes: int = 0
    """What it needs, if it does not fit."""


class Trials(NamedTuple):
    """What to measure, the config's own first, and what not."""

    kept: list[Trial]
    dropped: list[Dropped]


class PlannedFacts(NamedTuple):
    """What the plan needs."""

    shape: ModelShape
    activations: Callable[[Recomputation, int], Activations | None]
    """By `activation_checkpointing` and micro-batch size; None where they are not known."""
    device: Device | None
    """None: nothing is dropped for memory."""


class _Choices(NamedTuple):
    backends: Sequence[str]
    strategies: Sequence[str]
    words: Sequence[Recomputation]
    micro_batches: Sequence[int]


def own_trial(cfg: Config) -> Trial:
    """The config as it is."""
    training = cfg.training
    return Trial(
        cfg.backend,
        cfg.sharding.strategy,
        _own_word(cfg),
        training.micro_batch_size,
        training.gradient_accumulation_steps,
    )


def words_of(cfg: Config, known: Iterable[str]) -> list[Recomputation]:
    """The config's own `activation_checkpointing` and the words that the model can have, the cheapest in time first."""
    own, possible = _own_word(cfg), set(known)
    words: list[Recomputation] = [word for word in RECOMPUTATIONS if word in possible or word == own]
    return words if own in words else [own, *words]


def trials_of(
    cfg: Config,
    backends: Sequence[str],
    strategies: Sequence[str],
    words: Sequence[Recomputation],
    most: int,
    topology: Topology,
    facts: PlannedFacts | None,
) -> Trials:
    """Choose what to measure.

    Args:
        cfg: The config, which is always measured.
        backends: Engines.
        strategies: Strategies.
        words: Kinds of recomputation, the cheapest first.
        most: How many trials are measured.
        topology: The ranks.
        facts: For the plan; None if the model is not known: then nothing is dropped for memory.
    """
    choices = _Choices(backends, strategies, words, _micro_batches(cfg))
    own = own_trial(cfg)
    found = [_judged(cfg, trial, topology, facts) for trial in _combinations(cfg, choices)]
    dropped = [
        Dropped(trial, reason, _bytes_of(planned)) for trial, reason, planned in found if reason and trial != own
    ]
    fitting = [(trial, planned) for trial, reason, planned in found if not reason]
    useless = [drop for drop in _useless(fitting, words, facts) if drop.trial != own]
    dropped += useless
    left = {drop.trial for drop in useless}
    others = [each for each in fitting if each[0] != own and each[0] not in left]
    ranked = sorted(others, key=lambda each: _price(each[0], each[1], words, topology, facts))
    names = [own, *(trial for trial, _ in ranked)]
    dropped += [
        Dropped(trial, f"beyond the {most} that the plan expects to be fastest; raise --most") for trial in names[most:]
    ]
    return Trials(names[:most], dropped)


def _micro_batches(cfg: Config) -> list[int]:
    """The sizes that give the same samples in an update, the largest first."""
    samples = cfg.training.micro_batch_size * cfg.training.gradient_accumulation_steps
    return [size for size in range(samples, 0, -1) if samples % size == 0]


def _combinations(cfg: Config, choices: _Choices) -> Iterator[Trial]:
    samples = cfg.training.micro_batch_size * cfg.training.gradient_accumulation_steps
    for backend in choices.backends:
        for strategy in choices.strategies:
            for word in choices.words:
                for size in choices.micro_batches:
                    yield Trial(backend, strategy, word, size, samples // size)


def _judged(
    cfg: Config, trial: Trial, topology: Topology, facts: PlannedFacts | None
) -> tuple[Trial, str, Candidate | None]:
    """A trial, why it cannot run, and its plan."""
    try:
        chosen = cfg.override(*changes) if (changes := trial.changes(cfg)) else cfg
        if facts is None:
            translate(chosen, topology=topology).check(strict=chosen.strict)
            return trial, "", None
    except (ConfigError, BackendError) as error:
        return trial, str(error.problems[0] if isinstance(error, ConfigError) and error.problems else error), None
    activations = facts.activations(trial.recomputation, trial.micro_batch_size)
    planned = candidate_of(chosen, facts.shape, topology, activations, trial.backend, trial.strategy)
    if planned.peak is None:
        return trial, planned.refusal, planned
    if facts.device is not None and not planned.fits(facts.device.memory):
        needed = (
            f"needs {with_unit(planned.peak.nbytes)} of {with_unit(facts.device.memory)} in the {planned.peak.where}"
        )
        return trial, f"does not fit: {needed}", planned
    return trial, "", planned


def _bytes_of(planned: Candidate | None) -> int:
    return 0 if planned is None or planned.peak is None else planned.peak.nbytes


def _useless(
    found: Sequence[tuple[Trial, Candidate | None]], words: Sequence[Recomputation], facts: PlannedFacts | None
) -> Iterator[Dropped]:
    """Those that recompute although the same without it surely fits."""
    if facts is None or facts.device is None:
        return
    memory = facts.device.memory
    sure: dict[Trial, Recomputation] = {}
    for trial, planned in sorted(found, key=lambda each: words.index(each[0].recomputation)):
        key = trial._replace(recomputation="")
        if key in sure:
            yield Dropped(trial, f"recomputes more, and activation_checkpointing {sure[key]} fits")
        elif planned is not None and planned.fits(memory, surely=True):
            sure[key] = trial.recomputation


def _price(
    trial: Trial,
    planned: Candidate | None,
    words: Sequence[Recomputation],
    topology: Topology,
    facts: PlannedFacts | None,
) -> tuple[int, float, int]:
    """The least recomputation first, then the least time on the wire, then the largest micro-batch."""
    seconds = 0.0
    if facts is not None and facts.device is not None and planned is not None and planned.footprint is not None:
        seconds = wire_of(planned.footprint, topology, facts.device).seconds
    return words.index(trial.recomputation), seconds, -trial.micro_batch_size


def _says_nothing(cfg: Config, change: str) -> bool:
    path, _, value = change.partition("=")
    return bare(value_at(cfg, path)) == value


def _own_word(cfg: Config) -> Recomputation:
    own = cfg.activation_checkpointing
    return own if isinstance(own, str) else tuple(own)


# -- What the plan knows of a model, for `unishard tune`. Imports torch only for what is not cached --


class PlannedModelFacts:
    """The activations of a model under each kind of recomputation."""

    def __init__(self, model: PlannedModel, seq_len: int) -> None:
        """Hold the model.

        Args:
            model: The model.
            seq_len: Tokens of a sample.
        """
        self._model, self._seq_len = model, seq_len
        self._known: dict[Recomputation, Callable[[int], Activations] | None] = {}
        self.note = ""
        """Why activations are not known."""

    def activations(self, word: Recomputation, micro_batch_size: int) -> Activations | None:
        """Those of a micro-batch; None if the model cannot be run like this."""
        if word not in self._known:
            try:
                self._known[word] = by_micro_batch(
                    lambda size, length: self._model.activations(
                        size, length, word if isinstance(word, str) else list(word)
                    ),
                    self._seq_len,
                )
            except ModelError as error:
                self._known[word] = None
                self.note = self.note or str(error)
        scaled = self._known[word]
        return None if scaled is None else scaled(micro_batch_size)


def facts_of(name: str, cfg: Config, device: Device | None, seq_len: int) -> tuple[PlannedFacts, str]:
    """What the plan needs to drop candidates, and why activations are not known, if they are not.

    Args:
        name: The model, as for `unishard plan`.
        cfg: The config.
        device: What they run on.
        seq_len: Tokens of a sample.

    Raises:
        ConfigError: The model cannot be built.
    """
    model = PlannedModel(name, cfg)
    known = PlannedModelFacts(model, seq_len)
    known.activations("none", 1)
    return PlannedFacts(model.shape, known.activations, device), known.note
