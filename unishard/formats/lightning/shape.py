"""Where a file has the Trainer's arguments, and what names its strategy.

LightningCLI writes `trainer: {strategy: {class_path, init_args}}`, below the subcommand or not; people write only the
Trainer's arguments, or a strategy's class with its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Path
from unishard.formats.lightning.built import ARGUMENTS, CLASS, short

_SUBCOMMANDS = ("fit", "validate", "test", "predict")
_NAMED = (CLASS, *ARGUMENTS)


class Shape(NamedTuple):
    """A file, taken apart."""

    top: Path
    """What surrounds everything: the subcommand, or nothing."""
    trainer: Path
    """Where the Trainer's arguments stand."""
    strategy: Path
    """Where the strategy stands; the same as `trainer` in a file that is a strategy's class and arguments."""
    arguments: Mapping[str, Any]
    """The Trainer's, but for the strategy."""
    named: Any
    """What names the strategy: a word, or a class with its arguments."""
    beside: Mapping[Path, Any]
    """What stands outside the Trainer's section."""

    @classmethod
    def of(cls, data: Mapping[str, Any], trainers: Iterable[str] = ()) -> Shape:
        """That of a file.

        Args:
            data: The file.
            trainers: The Trainer's arguments, which a strategy's class may have beside its own.
        """
        top = next(((word,) for word in _SUBCOMMANDS if _section(data.get(word)) and len(data) <= 2), ())
        inner = data[top[0]] if top else data
        above: dict[Path, Any] = {(str(name),): item for name, item in data.items() if top and name not in top}
        root = next((word for word in ("trainer", "fabric") if _section(inner.get(word))), None)
        if root:
            beside = {(*top, str(name)): item for name, item in inner.items() if name != root}
            arguments = {name: item for name, item in inner[root].items() if name != "strategy"}
            trainer = (*top, root)
            return cls(top, trainer, (*trainer, "strategy"), arguments, inner[root].get("strategy"), beside | above)
        class_ = inner.get(CLASS)
        if isinstance(class_, str) and class_ and short(class_) not in ("Trainer", "Fabric"):
            named = {name: item for name, item in inner.items() if name in _NAMED or name not in trainers}
            return cls(top, top, top, {name: inner[name] for name in inner.keys() - named.keys()}, named, above)
        arguments = {name: item for name, item in inner.items() if name != "strategy"}
        return cls(top, top, (*top, "strategy"), arguments, inner.get("strategy"), above)

    @property
    def bare(self) -> bool:
        """Whether the file itself is the strategy's class."""
        return self.strategy == self.trainer


def _section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)
