"""The strategy of a file: what it runs, with its arguments and where they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, Path, Unreadable, interpret
from unishard.contract.rules import Fit
from unishard.formats.engines.block import EngineBlock, SourceKey, combined
from unishard.formats.lightning.built import ARGUMENTS, Built, built
from unishard.formats.lightning.rows import ELSEWHERE, TOOL, UNSET
from unishard.formats.lightning.shape import Shape
from unishard.formats.lightning.strategies import run_by


class Strategy(NamedTuple):
    """A strategy that a file asks for, and what stands around it."""

    runs: str
    """The class: `DDPStrategy`, `FSDPStrategy`, `DeepSpeedStrategy` or `ModelParallelStrategy`."""
    fabric: bool
    """Whether it is Fabric's, which has other defaults and leaves more to the training script."""
    named: SourceKey
    """The name or the class."""
    arguments: Mapping[str, Any]
    """Those that are written."""
    stands_for: Mapping[str, Any]
    """Those that its name stands for."""
    places: Mapping[str, Path]
    base: Path
    """Where an argument would stand that is not written."""
    topology: Topology | None

    def place(self, argument: str) -> Path:
        """Where an argument stands."""
        return self.places.get(argument, (*self.base, argument))

    def of(self, argument: str, effect: KeyEffect) -> Entry:
        """An entry for an argument."""
        return Entry(self.place(argument), self.arguments.get(argument), effect)

    def source_keys(self, *names: str) -> list[SourceKey]:
        """The arguments that say something, or the strategy's name."""
        written = [SourceKey(self.place(name), self.arguments[name]) for name in names if name in self.arguments]
        return written or [self.named]

    def says(self, fields: Mapping[str, Any]) -> Entry:
        """What only the name says."""
        return combined(self.named._replace(fields=fields), [])

    def entries(self, block: EngineBlock, defaults: Mapping[str, Any]) -> list[Entry]:
        """What the engine's arguments say, the strategy's name first, also where no argument comes from it."""
        name = self.named._replace(fields={"backend": block.engine})
        block.source_keys = {
            key: tuple(name if source == self.named else source for source in sources)
            for key, sources in block.source_keys.items()
        }
        entries = block.entries(defaults=defaults, topology=self.topology)
        if not any(entry.path == name.path for entry in entries):
            entries = [combined(name, []), *entries]
        return sorted(entries, key=lambda entry: entry.path != name.path)

    def table(self, keys: Mapping[str, Key], known: Iterable[str] = ()) -> Iterator[Entry]:
        """Entries of arguments that only Lightning has.

        Args:
            keys: Their rows.
            known: Arguments that others read.
        """
        written = {name: value for name, value in self.arguments.items() if name not in known}
        rows = {**dict.fromkeys(known, ELSEWHERE), **keys}  # for the hint at a misspelt one
        one_value = {name: [value] if isinstance(value, Mapping) else value for name, value in written.items()}
        for entry in interpret(rows, one_value, tool=TOOL, topology=self.topology):
            name = entry.path[0]
            yield entry._replace(path=(*self.place(name), *entry.path[1:]), value=written.get(name, entry.value))


def strategy_in(shape: Shape, topology: Topology | None) -> tuple[Strategy | None, list[Entry]]:
    """The strategy of a file; or None, and what says that it is refused. With keys beside a class and its arguments,
    which jsonargparse refuses, and sections of arguments that are empty.
    """
    instance = built(shape.named)
    inside, arguments = (instance.inside, instance.arguments) if instance else ({}, {})
    places = {name: (*shape.strategy, *inside[name], name) for name in arguments}
    path = (*shape.strategy, instance.key) if instance and instance.key else shape.strategy
    named = SourceKey(path, instance.path if instance else shape.named, assumed=shape.named is None)
    beside = list(_beside(instance, shape)) if instance and instance.key else []
    try:
        runs, fabric, stands_for = run_by(instance, shape.named)
    except Unreadable as error:
        lost = KeyEffect(Fit.IGNORED, "belongs to the strategy that is refused")
        refused = Entry(named.path, named.value, KeyEffect(Fit.UNSUPPORTED, str(error)))
        return None, [refused, *(Entry(places[name], item, lost) for name, item in arguments.items()), *beside]
    base = (*shape.strategy, "init_args") if instance and instance.key else shape.strategy
    fabric = fabric or "fabric" in shape.trainer
    return Strategy(runs, fabric, named, arguments, stands_for, places, base, topology), beside


def _beside(instance: Built, shape: Shape) -> Iterator[Entry]:
    for name in ARGUMENTS:
        value = shape.named.get(name, UNSET)
        if value is not UNSET and not (isinstance(value, Mapping) and value):
            note = f"must be a mapping of arguments, got {shown(value)}; write one argument a line"
            yield Entry((*shape.strategy, name), value, KeyEffect(Fit.UNSUPPORTED, note) if value else UNSET)
    for name in instance.others:
        note = f"{TOOL} does not know this key beside {instance.key}; write it below init_args"
        if shape.bare and name == "strategy":
            note = f"repeats {instance.key}, which names the strategy; keep one of the two"
        yield Entry((*shape.strategy, name), shape.named[name], KeyEffect(Fit.UNSUPPORTED, note))
