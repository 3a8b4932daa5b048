"""One entry for each key of a file with Lightning's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, Unreadable, interpret, left_out
from unishard.contract.rules import Fit
from unishard.formats.lightning.keys import BESIDE, OLDER, PRECISIONS, TRAINER, UNSET, place_in, strategy_in
from unishard.formats.lightning.recipe_keys import optimizer_entries, scheduler_entries
from unishard.formats.lightning.saving import saving_entries
from unishard.formats.lightning.shape import ARGUMENTS, CLASS, Built, Shape, Strategy, built, short, strategy_of
from unishard.formats.lightning.strategy_arguments import TOOL, StrategyArguments, entries_of
from unishard.formats.source import Source

_RECIPES = {"optimizer": optimizer_entries, "lr_scheduler": scheduler_entries}
_OWN_CLASS = "LightningCLI hands it to a class of your training script"
_ELSEWHERE = Key(lambda value, given: UNSET)


@dataclass(frozen=True, slots=True)
class LightningDocument:
    """A file, taken apart."""

    source: Source
    shape: Shape
    topology: Topology | None

    @classmethod
    def of(cls, source: Source, topology: Topology | None) -> LightningDocument:
        """Take a file apart. The ranks are those given, or those that `devices` and `num_nodes` say."""
        shape = Shape.of(source.data)
        return cls(source, shape, topology or _topology(shape.trainer_in(source.data)))

    def entries(self) -> list[Entry]:
        """What each key says, in the order strategy, Trainer, the rest."""
        strategy, refused = self._strategy()
        found = [*refused]
        runs = strategy.runs if strategy else ""
        trainer = self._trainer(runs, own=self._own_formats())
        if strategy:
            place = next(entry for entry in trainer if entry.path[-1] == "precision")
            given = self._unwrapped(strategy, place if runs == "DeepSpeedStrategy" else None)
            found += entries_of(given)
        found += self._beside_class()
        if runs == "DeepSpeedStrategy":
            trainer = [entry for entry in trainer if entry.path[-1] != "precision"]
        return [*_clipped_once(found, trainer), *self._beside()]

    def without_its_class(self, entry: Entry) -> Entry:
        """The same, no more kept if it is an argument of the strategy's class, which another one would not take."""
        depth = len(self.shape.strategy)
        inside = entry.path[:depth] == self.shape.strategy and entry.path[depth : depth + 1] in [
            (name,) for name in ARGUMENTS
        ]
        return entry._replace(effect=entry.effect._replace(copy_verbatim=False)) if inside else entry

    def speaks_for_lightning(self, entry: Entry) -> bool:
        """Whether an entry is no argument of a class of the user's own."""
        return entry.effect.note != _OWN_CLASS

    # The strategy.

    def _value(self) -> Any:
        trainer = self.shape.trainer_in(self.source.data)
        if self.shape.apart:
            return self.shape.apart_in(self.source.data)
        return trainer if self.shape.bare else strategy_in(trainer)

    def _formerly(self) -> str:
        """The argument that named the strategy before Lightning 1.5, where the file has it so; empty otherwise."""
        trainer = self.shape.trainer_in(self.source.data)
        return "" if self.shape.bare or self.shape.apart or "strategy" in trainer else place_in(trainer)

    def _built(self) -> Built | None:
        found = built(self._value())
        if found is None or not self.shape.bare:
            return found
        theirs = {
            name: item
            for name, item in found.arguments.items()
            if found.inside[name] or name not in {**TRAINER, **OLDER, **BESIDE, **_RECIPES}
        }
        return found._replace(arguments=theirs)

    def _named(self, found: Built | None) -> Entry:
        path = (*self.shape.strategy, found.key) if found and found.key else self.shape.strategy
        if formerly := self._formerly():
            return Entry(
                (*self.shape.trainer, formerly),
                self.shape.trainer_in(self.source.data)[formerly],
                KeyEffect(rejected_upstream=True),
            )
        written = self.shape.bare or self.shape.apart or "strategy" in self.shape.trainer_in(self.source.data)
        return Entry(path, found.path if found else self._value(), KeyEffect(), assumed=not written)

    def _strategy(self) -> tuple[Strategy | None, list[Entry]]:
        found = self._built()
        try:
            return strategy_of(found, self._value(), fabric="fabric" in self.shape.trainer), []
        except Unreadable as error:
            named = self._named(found)._replace(effect=KeyEffect(Fit.UNSUPPORTED, str(error)))
            lost = KeyEffect(Fit.IGNORED, "belongs to the strategy that is refused")
            arguments = found.arguments if found else {}
            return None, [named, *(Entry(self._place(found, name), item, lost) for name, item in arguments.items())]

    def _place(self, found: Built | None, name: str) -> tuple[str, ...]:
        return (*self.shape.strategy, *(found.inside[name] if found else ()), name)

    def _unwrapped(self, strategy: Strategy, precision: Entry | None) -> StrategyArguments:
        found = self._built()
        arguments = found.arguments if found else {}
        return StrategyArguments(
            strategy,
            self._named(found),
            arguments,
            {name: self._place(found, name) for name in arguments},
            (*self.shape.strategy, "init_args") if found and found.key else self.shape.strategy,
            self.topology,
            self.source.folder,
            precision,
        )

    def _own_formats(self) -> str:
        """`mixed`, or `fp16` for one that computes in it, where FSDP has its own dtypes; empty otherwise."""
        found = self._built()
        own = found.arguments.get("mixed_precision") if found else None
        formats = built(own)
        if not own:
            return ""
        return (
            "fp16"
            if formats and "16" in str(param := formats.arguments.get("param_dtype")) and "bf" not in str(param)
            else "mixed"
        )

    def _beside_class(self) -> Iterator[Entry]:
        """Keys beside a class and its arguments, which jsonargparse refuses, and sections of arguments that are
        empty.
        """
        found, value = self._built(), self._value()
        if found is None or not isinstance(value, Mapping):
            return
        for name in ARGUMENTS:
            if name in value and not (isinstance(value[name], Mapping) and value[name]):
                yield Entry((*self.shape.strategy, name), value[name], _section(value[name]))
        for name in CLASS:
            if name in value and found.key not in ("", name):
                note = f"names a class beside {found.key}, which is {shown(found.path)}; keep one of the two"
                yield Entry((*self.shape.strategy, name), value[name], KeyEffect(Fit.UNSUPPORTED, note))
        if self.shape.bare and "strategy" in value and found.inside.get("strategy") != ():
            note = f"repeats {found.key}, which names the strategy; keep one of the two"
            yield Entry((*self.shape.strategy, "strategy"), value["strategy"], KeyEffect(Fit.UNSUPPORTED, note))
        if not self.shape.bare:
            for name in found.others:
                note = f"{TOOL} does not know this key beside {found.key}; write it below init_args"
                yield Entry((*self.shape.strategy, name), value[name], KeyEffect(Fit.UNSUPPORTED, note))

    # The Trainer's arguments, and what stands beside them.

    def _trainer(self, runs: str, *, own: str) -> list[Entry]:
        said = dict(self.shape.trainer_in(self.source.data))
        if self.shape.bare:
            found = self._built()
            theirs = {name for name in found.arguments if not found.inside[name]} if found else set()
            said = {
                name: item for name, item in said.items() if name not in (*CLASS, *ARGUMENTS) and name not in theirs
            }
        said["strategy"] = f"{runs} {own}" if runs == "FSDPStrategy" and own else runs
        rows = {**TRAINER, **OLDER, "strategy": _ELSEWHERE}
        if formerly := self._formerly():
            said.pop(formerly)
        elsewhere = ["strategy"]
        if self.shape.trainer == self.shape.top:
            elsewhere += _RECIPES
            rows |= {**BESIDE, **dict.fromkeys(_RECIPES, _ELSEWHERE)}
        rows |= {word: Key(_target) for word in CLASS if not self.shape.bare}
        found_entries = interpret(
            rows, said, tool=TOOL, defaults=_by_plugin(said.get("plugins")), topology=self.topology
        )
        found_entries = [_stale(entry) if entry.path[0] in OLDER else entry for entry in found_entries]
        entries = [
            entry.at(*self.shape.trainer, *entry.path) for entry in found_entries if entry.path[0] not in elsewhere
        ]
        entries += saving_entries(said.get("callbacks"), (*self.shape.trainer, "callbacks"))
        if self.shape.trainer == self.shape.top:
            entries += self._recipes(said)
        return entries

    def _recipes(self, section: Mapping[str, Any]) -> list[Entry]:
        return [
            entry
            for name, read in _RECIPES.items()
            if name in section
            for entry in read(section[name], (*self.shape.top, name))
        ]

    def _beside(self) -> list[Entry]:
        """LightningCLI's other keys; those that it does not have are arguments of the user's own classes."""
        section = self.shape.beside(self.source.data)
        plain = {str(name): item for name, item in section.items() if name not in _RECIPES}
        found = interpret(
            {**BESIDE},
            {name: item for name, item in plain.items() if name in BESIDE},
            tool=TOOL,
            topology=self.topology,
        )
        found += [Entry((name,), item, left_out(_OWN_CLASS)) for name, item in plain.items() if name not in BESIDE]
        above = [Entry((name,), item, left_out(_OWN_CLASS)) for name, item in self._outside().items()]
        return [*(entry.at(*self.shape.top, *entry.path) for entry in found), *self._recipes(section), *above]

    def _outside(self) -> Mapping[str, Any]:
        """What stands beside the subcommand."""
        return (
            {name: item for name, item in self.source.data.items() if name not in self.shape.top}
            if self.shape.top
            else {}
        )


def _stale(entry: Entry) -> Entry:
    """A key of Lightning 1, which Lightning 2 refuses."""
    return entry._replace(effect=entry.effect._replace(rejected_upstream=True))


def _by_plugin(plugins: Any) -> Mapping[str, Any]:
    """The word of `precision` that a plugin stands for."""
    for item in plugins if isinstance(plugins, list | tuple) else [plugins]:
        found = built(item)
        if found and short(found.path) in PRECISIONS and isinstance(found.arguments.get("precision"), str):
            return {"precision": found.arguments["precision"]}
    return {}


def _target(value: Any, given: Any) -> KeyEffect:
    if short(value) not in ("Trainer", "Fabric"):
        return KeyEffect(
            Fit.UNSUPPORTED, f"is no Trainer of Lightning: {value}; name the strategy's class, or the Trainer"
        )
    return left_out("names the Trainer")


def _section(value: Any) -> KeyEffect:
    """What a section without arguments says."""
    if not value:
        return UNSET
    return KeyEffect(Fit.UNSUPPORTED, f"must be a mapping of arguments, got {shown(value)}; write one argument a line")


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


def _topology(trainer: Mapping[str, Any]) -> Topology | None:
    """The ranks that `devices` and `num_nodes` say; None where they leave it open."""
    devices = _count(trainer.get("devices", trainer.get("gpus")))
    nodes = _count(trainer.get("num_nodes", 1))
    return Topology(world_size=devices * nodes, local_world_size=devices) if devices and nodes else None


def _count(value: Any) -> int | None:
    """Of devices: a number, or a list of their indices."""
    if isinstance(value, list | tuple):
        return len(value) or None
    text = str(value).strip()
    if "," in text:
        return len([item for item in text.split(",") if item.strip()])
    return int(text) if text.isdigit() and 0 < int(text) < 2**31 else None
