"""The part of a file that names the strategy, with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unishard.config.describe import shown
from unishard.config.topology import Topology
from unishard.contract.entries import Entry, KeyEffect, Unreadable
from unishard.contract.rules import Fit
from unishard.formats.lightning.built import ARGUMENTS, Built, built
from unishard.formats.lightning.keys import BESIDE, REMOVED, TOOL, TRAINER
from unishard.formats.lightning.recipe_keys import RECIPES
from unishard.formats.lightning.rows import UNSET
from unishard.formats.lightning.shape import Shape
from unishard.formats.lightning.strategies import Strategy, strategy_of
from unishard.formats.lightning.strategy_arguments import StrategyArguments


@dataclass(frozen=True, slots=True)
class StrategySection:
    """The strategy of a file, wherever it stands."""

    data: Mapping[str, Any]
    """The file."""
    shape: Shape

    def read(self) -> tuple[Strategy | None, list[Entry]]:
        """The strategy; or None, and what says that it is refused."""
        instance = self._built()
        try:
            return strategy_of(instance, self._value(), fabric="fabric" in self.shape.trainer), []
        except Unreadable as error:
            named = self._named(instance)._replace(effect=KeyEffect(Fit.UNSUPPORTED, str(error)))
            lost = KeyEffect(Fit.IGNORED, "belongs to the strategy that is refused")
            arguments = instance.arguments if instance else {}
            return None, [named, *(Entry(self._place(instance, name), item, lost) for name, item in arguments.items())]

    def arguments(
        self, strategy: Strategy, topology: Topology | None, folder: Path | None, precision: Entry | None
    ) -> StrategyArguments:
        """Its arguments, for its reader."""
        instance = self._built()
        arguments = instance.arguments if instance else {}
        return StrategyArguments(
            strategy,
            self._named(instance),
            arguments,
            {name: self._place(instance, name) for name in arguments},
            (*self.shape.strategy, "init_args") if instance and instance.key else self.shape.strategy,
            topology,
            folder,
            precision,
        )

    def flat_arguments(self) -> set[str]:
        """The names of arguments that stand beside the class and not in a section of their own."""
        instance = self._built()
        return {name for name in instance.arguments if not instance.inside[name]} if instance else set()

    def own_formats(self) -> str:
        """`mixed`, or `fp16` for one that computes in it, where FSDP has its own dtypes; empty otherwise."""
        instance = self._built()
        own = instance.arguments.get("mixed_precision") if instance else None
        formats = built(own)
        if not own:
            return ""
        return (
            "fp16"
            if formats and "16" in str(param := formats.arguments.get("param_dtype")) and "bf" not in str(param)
            else "mixed"
        )

    def other_keys(self) -> Iterator[Entry]:
        """Keys beside a class and its arguments, which jsonargparse refuses, and sections of arguments that are
        empty.
        """
        instance, value = self._built(), self._value()
        if instance is None or not isinstance(value, Mapping):
            return
        for name in ARGUMENTS:
            if name in value and not (isinstance(value[name], Mapping) and value[name]):
                yield Entry((*self.shape.strategy, name), value[name], _empty(value[name]))
        if self.shape.bare and "strategy" in value and instance.inside.get("strategy") != ():
            note = f"repeats {instance.key}, which names the strategy; keep one of the two"
            yield Entry((*self.shape.strategy, "strategy"), value["strategy"], KeyEffect(Fit.UNSUPPORTED, note))
        if not self.shape.bare:
            for name in instance.others:
                note = f"{TOOL} does not know this key beside {instance.key}; write it below init_args"
                yield Entry((*self.shape.strategy, name), value[name], KeyEffect(Fit.UNSUPPORTED, note))

    def _value(self) -> Any:
        """What names the strategy."""
        trainer = self.shape.trainer_in(self.data)
        return trainer if self.shape.bare else trainer.get("strategy")

    def _built(self) -> Built | None:
        instance = built(self._value())
        if instance is None or not self.shape.bare:
            return instance
        theirs = {
            name: item
            for name, item in instance.arguments.items()
            if instance.inside[name] or name not in {*TRAINER, *REMOVED, *BESIDE, *RECIPES}
        }
        return instance._replace(arguments=theirs)

    def _named(self, instance: Built | None) -> Entry:
        path = (*self.shape.strategy, instance.key) if instance and instance.key else self.shape.strategy
        written = self.shape.bare or "strategy" in self.shape.trainer_in(self.data)
        return Entry(path, instance.path if instance else self._value(), KeyEffect(), assumed=not written)

    def _place(self, instance: Built | None, name: str) -> tuple[str, ...]:
        return (*self.shape.strategy, *(instance.inside[name] if instance else ()), name)


def _empty(value: Any) -> KeyEffect:
    """What a section without arguments says."""
    if not value:
        return UNSET
    return KeyEffect(Fit.UNSUPPORTED, f"must be a mapping of arguments, got {shown(value)}; write one argument a line")
