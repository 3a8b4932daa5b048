"""What a `unishard translate` command asks for, and the command that asks for something else."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unishard.cli.wrapping import shell_lines
from unishard.config.topology import Topology
from unishard.errors import ConfigError

if TYPE_CHECKING:
    from unishard.formats import Outcome


class TranslateRequest(NamedTuple):
    """The arguments of one translation."""

    source: Path
    to: str
    from_: str | None = None
    topology: Topology | None = None
    overrides: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    output: Path | None = None
    with_: str | None = None

    def translate(self, *, drop_unsupported: bool = False) -> Outcome:
        """Translate; with `drop_unsupported`, without the keys that are refused, if that helps.

        Raises:
            ConfigError: The file cannot be read, is in no known format, or an override cannot be used.
        """
        from unishard.formats import translate

        remedy = self._remedy(only_drop=True) if drop_unsupported else None
        outcome = remedy or translate(self.source, self.to, **self._said())
        return self._with_effects(outcome) if outcome.dropped else outcome

    def _with_effects(self, outcome: Outcome) -> Outcome:
        from unishard.formats import read
        from unishard.formats.advice.drop_effects import with_effects

        try:
            whole = read(self.source, self.from_, (), self.topology)
        except ConfigError:
            return outcome  # only without these keys does it say anything
        return with_effects(outcome, whole)

    def working(self) -> TranslateRequest | None:
        """The nearest request in which nothing is refused; None if there is none."""
        remedy = self._remedy(only_drop=False)
        if remedy is None:
            return None
        further = remedy.overrides[len(self.overrides) :]
        changed = {text.partition("=")[0] for text in further}
        overrides = (text for text in self.overrides if text.partition("=")[0].strip() not in changed)
        return self._replace(overrides=(*overrides, *further), drop=remedy.drop)

    def _remedy(self, *, only_drop: bool) -> Outcome | None:
        from unishard.formats.advice.remedies import remedy
        from unishard.formats.files.source import open_source

        return remedy(open_source(self.source), self.to, **self._said(), only_drop=only_drop)

    def _said(self) -> dict[str, Any]:
        """What is said beside the file and the format."""
        return {
            "from_": self.from_,
            "overrides": self.overrides,
            "topology": self.topology,
            "drop": self.drop,
            "with_": self.with_,
        }

    def command(self) -> str:
        """The command to paste into a shell."""
        return shell_lines(map(shlex.quote, ("unishard", "translate", str(self.source), *self._options())))

    def _options(self) -> Iterator[str]:
        yield from ("--to", self.to)
        if self.from_:
            yield from ("--from", self.from_)
        if self.output:
            yield from ("--output", str(self.output))
        if self.topology:
            yield from ("--world-size", str(self.topology.world_size))
            if self.topology.local_world_size != self.topology.world_size:
                yield from ("--gpus-per-node", str(self.topology.local_world_size))
        if self.with_:
            yield from ("--with", self.with_)
        for option, values in (("--set", self.overrides), ("--drop", self.drop)):
            for value in values:
                yield from (option, value)
