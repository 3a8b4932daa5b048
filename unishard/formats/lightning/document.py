"""One entry for each key of a file with Lightning's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, interpret, left_out
from unishard.contract.rules import Fit
from unishard.formats.lightning import ddp, deepspeed, fsdp, model_parallel
from unishard.formats.lightning.built import ARGUMENTS, CLASS, short
from unishard.formats.lightning.keys import BESIDE, REMOVED, TOOL, TRAINER
from unishard.formats.lightning.model_checkpoint import saving_entries
from unishard.formats.lightning.plugins import precision_in
from unishard.formats.lightning.recipe_keys import RECIPES
from unishard.formats.lightning.rows import ELSEWHERE
from unishard.formats.lightning.shape import Shape
from unishard.formats.lightning.strategy_arguments import StrategyArguments
from unishard.formats.lightning.strategy_section import StrategySection
from unishard.formats.source import Source

_READERS: Mapping[str, Callable[[StrategyArguments], Iterable[Entry]]] = {
    "DDPStrategy": ddp.entries_of,
    "FSDPStrategy": fsdp.entries_of,
    "DeepSpeedStrategy": deepspeed.entries_of,
    "ModelParallelStrategy": model_parallel.entries_of,
}
_OWN = left_out("LightningCLI hands it to a class of your training script")._replace(beyond_fields=True)


@dataclass(frozen=True, slots=True)
class LightningDocument:
    """A file, taken apart."""

    source: Source
    shape: Shape
    topology: Topology | None

    @classmethod
    def of(cls, source: Source, topology: Topology | None) -> LightningDocument:
        """Take a file apart."""
        return cls(source, Shape.of(source.data), topology)

    def entries(self) -> list[Entry]:
        """What each key says, in the order strategy, Trainer, the rest."""
        section = StrategySection(self.source.data, self.shape)
        strategy, refused = section.read()
        entries = [*refused]
        runs = strategy.runs if strategy else ""
        trainer = self._trainer(runs, section)
        if strategy:
            place = next(entry for entry in trainer if entry.path[-1] == "precision")
            precision = place if runs == "DeepSpeedStrategy" else None
            entries += _READERS[runs](section.arguments(strategy, self.topology, self.source.folder, precision))
        entries += section.other_keys()
        if runs == "DeepSpeedStrategy":
            trainer = [entry for entry in trainer if entry.path[-1] != "precision"]
        return [_without_hydra(entry) for entry in (*_clipped_once(entries, trainer), *self._beside())]

    def _trainer(self, runs: str, section: StrategySection) -> list[Entry]:
        arguments = dict(self.shape.trainer_in(self.source.data))
        if self.shape.bare:
            theirs = {CLASS, *ARGUMENTS} | section.flat_arguments()
            arguments = {name: item for name, item in arguments.items() if name not in theirs}
        own = section.own_formats()
        arguments["strategy"] = f"{runs} {own}" if runs == "FSDPStrategy" and own else runs
        rows = {**TRAINER, **REMOVED, "strategy": ELSEWHERE}
        elsewhere = ["strategy"]
        if self.shape.trainer == self.shape.top:
            elsewhere += RECIPES
            rows |= {**BESIDE, **dict.fromkeys(RECIPES, ELSEWHERE)}
        if not self.shape.bare:
            rows[CLASS] = Key(_trainer_class)
        found_entries = interpret(
            rows, arguments, tool=TOOL, defaults=precision_in(arguments.get("plugins")), topology=self.topology
        )
        entries = [
            entry.at(*self.shape.trainer, *entry.path) for entry in found_entries if entry.path[0] not in elsewhere
        ]
        entries += saving_entries(arguments.get("callbacks"), (*self.shape.trainer, "callbacks"))
        if self.shape.trainer == self.shape.top:
            entries += self._recipes(arguments)
        return entries

    def _recipes(self, section: Mapping[str, Any]) -> list[Entry]:
        return [
            entry
            for name, read in RECIPES.items()
            if name in section
            for entry in read(section[name], (*self.shape.top, name))
        ]

    def _beside(self) -> list[Entry]:
        """LightningCLI's other keys; those that it does not have are arguments of the user's own classes."""
        section = self.shape.beside(self.source.data)
        plain = {str(name): item for name, item in section.items() if name not in RECIPES}
        own = interpret(
            {**BESIDE},
            {name: item for name, item in plain.items() if name in BESIDE},
            tool=TOOL,
            topology=self.topology,
        )
        own += [Entry((name,), item, _OWN) for name, item in plain.items() if name not in BESIDE]
        above = [Entry((name,), item, _OWN) for name, item in self._outside().items()]
        return [*(entry.at(*self.shape.top, *entry.path) for entry in own), *self._recipes(section), *above]

    def _outside(self) -> Mapping[str, Any]:
        """What stands beside the subcommand."""
        return (
            {name: item for name, item in self.source.data.items() if name not in self.shape.top}
            if self.shape.top
            else {}
        )


def speaks_for_lightning(entry: Entry) -> bool:
    """Whether an entry is no argument of a class of the user's own."""
    return entry.effect != _OWN


_HYDRA = "_target_"
_BUILT_BY_HYDRA = f"{_HYDRA} of Hydra is not read; write class_path and init_args, or remove it"


def _without_hydra(entry: Entry) -> Entry:
    """The entry, refused where Hydra would build what it names and that counts."""
    if entry.effect.fit is Fit.IGNORED or not (_HYDRA in entry.path or _names(entry.value)):
        return entry
    return entry.but(Fit.UNSUPPORTED, _BUILT_BY_HYDRA)


def _names(value: Any) -> bool:
    """Whether a value names a class as Hydra does, or holds one that does."""
    match value:
        case Mapping():
            return _HYDRA in value or any(map(_names, value.values()))
        case list():
            return any(map(_names, value))
    return False


def _trainer_class(value: Any, document: Any) -> KeyEffect:
    if short(value) not in ("Trainer", "Fabric"):
        return KeyEffect(
            Fit.UNSUPPORTED, f"is no Trainer of Lightning: {value}; name the strategy's class, or the Trainer"
        )
    return left_out("names the Trainer")


_OVERRULED = "not used: Lightning sets it only in a DeepSpeed config without gradient_clipping"


def _clipped_once(strategy: list[Entry], trainer: list[Entry]) -> list[Entry]:
    """A DeepSpeed config's own clipping counts, and the Trainer's does not."""
    own = [entry for entry in strategy if entry.path[-1] == "gradient_clipping" and not entry.assumed]
    if not own:
        return [*strategy, *trainer]
    clips = ("gradient_clip_val", "gradient_clip_algorithm")
    overruled = KeyEffect(Fit.IGNORED, _OVERRULED)
    others = [entry for entry in trainer if entry.path[-1] not in clips or not entry.assumed]
    return [*strategy, *(entry._replace(effect=overruled) if entry.path[-1] in clips else entry for entry in others)]
