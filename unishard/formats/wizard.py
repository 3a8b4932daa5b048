"""A new unishard file: what `unishard init` asks, and how the answers become a config."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unishard.config import Config, Section, leaves, value_at
from unishard.config.describe import choices
from unishard.config.loading.placeholders import placeholder
from unishard.config.loading.undecided import check_text
from unishard.config.nested import is_within, nested
from unishard.config.topology import Topology
from unishard.config.unused import why_unused
from unishard.contract import registry
from unishard.contract.rules import Fit
from unishard.errors import ConfigError, Problem, UnusedFieldWarning
from unishard.formats.reading import ReadDocument
from unishard.formats.unishard.format import described

_FIELDS = dict(leaves(Config))
_PROPOSALS: Mapping[str, Any] = {"precision.compute": "bf16", "training.gradient_clipping": 1.0}
"""What a new file proposes where most people do not want the schema's default."""
_NEEDED: Mapping[str, Any] = {"scheduler.total_steps": 1000}
"""What a field starts from when another answer makes it necessary."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the wizard."""

    path: str
    """The field that the answer decides."""
    text: str
    holds: Callable[[Config], bool] = lambda cfg: True
    """Whether it is asked, after the answers so far."""


def _hybrid(cfg: Config) -> bool:
    return cfg.sharding.hybrid


def _gathered(cfg: Config) -> bool:
    return cfg.sharding.within_group == "full_shard"


_QUESTIONS = (
    Question("backend", "Engine"),
    Question("sharding.strategy", "What is sharded across the ranks"),
    Question("sharding.group_size", "Ranks that share one copy (null: those of a node)", _hybrid),
    Question("precision.compute", "Dtype that the model computes in"),
    Question("training.micro_batch_size", "Samples that one rank puts through the model at once"),
    Question("training.gradient_accumulation_steps", "Micro-batches of each rank in one update"),
    Question("training.gradient_clipping", "Largest norm of the gradients (null: no clipping)"),
    Question("optimizer.name", "Optimizer"),
    Question("optimizer.lr", "Learning rate"),
    Question("optimizer.weight_decay", "Weight decay"),
    Question("scheduler.name", "Shape of the learning rate after the warm-up"),
    Question("scheduler.total_steps", "Optimizer steps in the full run", lambda cfg: cfg.scheduler.ends),
    Question("scheduler.warmup_steps", "Updates of warm-up"),
    Question("offload.optimizer", "Where the optimizer state lives", lambda cfg: cfg.sharding.strategy != "no_shard"),
    Question("offload.params", "Where the sharded parameters live", _gathered),
    Question("activation_checkpointing", "Modules whose forward runs again in backward"),
)
"""In the order in which they are asked; an answer may make a later question needless."""


def offered(path: str) -> list[str]:
    """The words that a field takes; empty when it takes numbers or names."""
    return list(registry.available()) if path == "backend" else choices(_FIELDS[path].annotation)


@dataclass(slots=True)
class Draft:
    """The file as it grows, answer by answer."""

    values: dict[str, Any] = field(default_factory=dict)
    """What is decided, by field."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Fields that stay open until they are answered, and who knows each."""
    left: frozenset[str] = frozenset()
    """Fields that the old config left to its training script."""
    fresh: bool = True
    """Whether it starts from nothing."""

    @classmethod
    def of(cls, reading: ReadDocument) -> Draft:
        """A draft that starts from an old config of any tool."""
        written = {name for entry in reading.entries if not entry.assumed for name in entry.effect.fields}
        decided = [path for path in _FIELDS if path in reading.decided and path not in reading.undecided]
        values = {path: value_at(reading.config, path) for path in decided}
        values = {path: value for path, value in values.items() if path in written or value != value_at(Config(), path)}
        if reading.config.native:
            values["native"] = reading.config.native
        undecided = {path: undecided.who for path, undecided in reading.undecided.items()}
        return cls(values, undecided, frozenset(_FIELDS) - reading.decided, fresh=False)

    @property
    def text(self) -> str:
        """The file."""
        document = self.values | {path: placeholder(path) for path in self.undecided}
        return described(nested({path: document[path] for path in _FIELDS if path in document}), self.undecided)

    @property
    def config(self) -> Config:
        """What it says now, a default standing in for what is open."""
        return check_text(self.text or "{}", "the new config")

    @property
    def questions(self) -> Iterator[Question]:
        """What is asked, each after the answers so far; at the end what the old config left open."""
        yield from (question for question in _QUESTIONS if question.holds(self.config))
        yield from [Question(path, path) for path in self.undecided]

    def proposal(self, path: str) -> Any:
        """What a question proposes."""
        if path in self.values:
            return self.values[path]
        if path in _NEEDED:
            return _NEEDED[path]
        return _PROPOSALS[path] if self.fresh and path in _PROPOSALS else value_at(self.config, path)

    def answer(self, changes: Iterable[str]) -> None:
        """Decide fields, each as `path=value`. What an answer makes meaningless leaves the file.

        Raises:
            ConfigError: A value cannot be used, or the engine cannot have it. Nothing is decided then.
        """
        changes = [leaf for change in changes for leaf in _expanded(change)]
        paths = [change.partition("=")[0].strip() for change in changes]
        still = {path: who for path, who in self.undecided.items() if not is_within(path, paths)}
        draft = replace(self, values=dict(self.values), undecided=still)
        config = draft._reconciled(changes, paths)
        if problems := [problem for problem in _refused(config) if is_within(problem.path, paths)]:
            raise ConfigError(problems)
        draft.values |= {path: value_at(config, path) for path in _FIELDS if is_within(path, paths)}
        self.values, self.undecided = draft.values, draft.undecided

    def _reconciled(self, changes: Sequence[str], paths: Sequence[str]) -> Config:
        """The config with these changes, after leaving out what they make meaningless and adding what they need."""
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UnusedFieldWarning)  # they leave the file, too
                    config = check_text(self.text or "{}", "the new config", changes)
                for path in [path for path in self.values if path in _FIELDS and why_unused(config, path)]:
                    del self.values[path]
                return config
            except ConfigError as error:
                faults = [problem.path for problem in error.problems]
                stale = [path for path in faults if path in self.values and not is_within(path, paths)]
                needed = [
                    path
                    for path in faults
                    if path in _NEEDED and path not in self.values and not is_within(path, paths)
                ]
                if not stale and not needed:
                    raise ConfigError([Problem(problem.path, problem.what) for problem in error.problems]) from None
                for path in stale:
                    del self.values[path]
                self.values |= {path: _NEEDED[path] for path in needed}

    def check(self) -> None:
        """Make sure that the engine can run it.

        Raises:
            ConfigError: It cannot.
        """
        if problems := list(_refused(self.config)):
            raise ConfigError(problems)


def _expanded(change: str) -> list[str]:
    """A short form such as `scheduler=cosine` as the fields that it stands for."""
    path, _, value = change.partition("=")
    field = Config.model_fields.get(path.strip())
    kind = field.annotation if field else None
    names = (
        kind.shorthand
        if isinstance(kind, type) and issubclass(kind, Section) and not value.strip().startswith("{")
        else ()
    )
    return [f"{path.strip()}.{name}={value}" for name in names] or [change]


def _refused(config: Config) -> Iterator[Problem]:
    translation = registry.get(config.backend).translate(config, Topology())
    for line in translation.report.of(Fit.UNSUPPORTED):
        yield Problem(line.path, f"{json.dumps(line.value)} is not supported by {config.backend}: {line.note}")
