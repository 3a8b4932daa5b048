"""A strategy's arguments and where they stand, for the readers of each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from unishard.config.topology import Topology
from unishard.contract.entries import Entry, Key, KeyEffect, Path, interpret
from unishard.formats.engine_block import EngineBlock, SourceKey, combined
from unishard.formats.lightning.keys import TOOL
from unishard.formats.lightning.rows import ELSEWHERE
from unishard.formats.lightning.strategies import Strategy


class StrategyArguments(NamedTuple):
    """A strategy's arguments, and what stands around them."""

    strategy: Strategy
    named: Entry
    """The name or the class; means nothing yet."""
    arguments: Mapping[str, Any]
    places: Mapping[str, Path]
    base: Path
    """Where an argument would stand that is not written."""
    topology: Topology | None
    folder: FilePath | None
    precision: Entry | None = None
    """The Trainer's precision where the engine takes it as arguments of its own."""

    def place(self, argument: str) -> Path:
        """Where an argument stands."""
        return self.places.get(argument, (*self.base, argument))

    def of(self, argument: str, effect: KeyEffect) -> Entry:
        """An entry for an argument."""
        return Entry(self.place(argument), self.arguments.get(argument), effect)

    def table(self, keys: Mapping[str, Key], names: Iterable[str], known: Iterable[str] = ()) -> Iterator[Entry]:
        """Entries of arguments that only Lightning has.

        Args:
            keys: Their rows.
            names: Those that are written.
            known: Arguments that others read, for the hint at a misspelt one.
        """
        written = {name: self.arguments[name] for name in names}
        rows = {**dict.fromkeys(known, ELSEWHERE), **keys}
        for entry in interpret(
            rows, {name: _as_one_value(value) for name, value in written.items()}, tool=TOOL, topology=self.topology
        ):
            name = entry.path[0]
            yield entry._replace(path=(*self.place(name), *entry.path[1:]), value=written.get(name, entry.value))

    def name_key(self, block: EngineBlock) -> SourceKey:
        """The strategy's name, which says the engine, and what it stands for."""
        return SourceKey(self.named.path, self.named.value, self.named.assumed, fields={"backend": block.engine})

    def source_keys(self, block: EngineBlock, *names: str) -> list[SourceKey]:
        """The arguments that say something, or the strategy's name."""
        written = [SourceKey(self.place(name), self.arguments[name]) for name in names if name in self.arguments]
        return written or [self.name_key(block)]

    def with_name(self, block: EngineBlock, entries: list[Entry]) -> list[Entry]:
        """The entries, that of the strategy's name first, also where no argument comes from it."""
        if any(entry.path == self.named.path for entry in entries):
            return sorted(entries, key=lambda entry: entry.path != self.named.path)
        return [combined(self.name_key(block), []), *entries]


def _as_one_value(value: Any) -> Any:
    """A mapping as one value, so that an unknown argument is named once."""
    return [value] if isinstance(value, Mapping) else value
