"""Where a file has the Trainer's arguments, and where those of its strategy.

LightningCLI writes `trainer: {strategy: {class_path, init_args}}`, below the subcommand or not; people write only the
Trainer's arguments, or a strategy's class with its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Path
from unishard.formats.lightning.built import CLASS, short

_SUBCOMMANDS = ("fit", "validate", "test", "predict")


class Shape(NamedTuple):
    """Where things stand in a file."""

    top: Path
    """What surrounds everything: the subcommand, or nothing."""
    trainer: Path
    """The Trainer's arguments."""
    strategy: Path
    """The strategy: a name or a class; the same as `trainer` in a file that is a strategy's class and arguments."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Shape:
        """That of a file."""
        top = next(((word,) for word in _SUBCOMMANDS if _section(data.get(word)) and len(data) <= 2), ())
        inner = data[top[0]] if top else data
        root = next((word for word in ("trainer", "fabric") if _section(inner.get(word))), None)
        if root:
            return cls(top, (*top, root), (*top, root, "strategy"))
        named = inner.get(CLASS)
        if isinstance(named, str) and named and short(named) not in ("Trainer", "Fabric"):
            return cls(top, top, top)
        return cls(top, top, (*top, "strategy"))

    def trainer_in(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The section with the Trainer's arguments."""
        return _at(data, self.trainer)

    def beside(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What stands beside the Trainer's section; nothing where there is no such section."""
        if self.trainer == self.top:
            return {}
        return {key: value for key, value in _at(data, self.top).items() if (*self.top, key) != self.trainer}

    @property
    def bare(self) -> bool:
        """Whether the file itself is the strategy's class."""
        return self.strategy == self.trainer


def _section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _at(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    value: Any = data
    for name in path:
        value = value[name]
    return value  # type: ignore[no-any-return]  # `of` has looked
