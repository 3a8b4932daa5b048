"""Where a file has the Trainer's arguments, and where those of its strategy.

LightningCLI writes `trainer: {strategy: {class_path, init_args}}`, below the subcommand or not; people write only the
Trainer's arguments, or a strategy's class with its arguments; Hydra says `_target_` for `class_path` and has the
arguments beside it; latent-diffusion and its kin say `target` and `params`, and may have the strategy beside the
Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unishard.contract.entries import Path

__all__ = ["ARGUMENTS", "CLASS", "Built", "Shape", "built", "short"]

CLASS = ("class_path", "_target_", "target")
"""The keys that name a class: jsonargparse's, Hydra's, and that of latent-diffusion."""
ARGUMENTS = ("init_args", "dict_kwargs", "params")
"""Sections with its arguments."""
_SUBCOMMANDS = ("fit", "validate", "test", "predict")


class Shape(NamedTuple):
    """Where things stand in a file."""

    top: Path
    """What surrounds everything: the subcommand, `lightning` as in latent-diffusion and its kin, or nothing."""
    trainer: Path
    """The Trainer's arguments."""
    strategy: Path
    """The strategy: a name or a class; the same as `trainer` in a file that is a strategy's class and arguments."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Shape:
        """That of a file."""
        top = next(((word,) for word in _SUBCOMMANDS if _section(data.get(word)) and len(data) <= 2), ())
        if _section(data.get("lightning")) and _section(data["lightning"].get("trainer")):
            top = ("lightning",)
        inner = data[top[0]] if top else data
        root = next((word for word in ("trainer", "fabric") if _section(inner.get(word))), None)
        if root:
            apart = top == ("lightning",) and "strategy" in inner and "strategy" not in inner[root]
            return cls(top, (*top, root), (*top, "strategy") if apart else (*top, root, "strategy"))
        named = next((inner[word] for word in CLASS if isinstance(inner.get(word), str)), "")
        if named and short(named) not in ("Trainer", "Fabric"):
            return cls(top, top, top)
        return cls(top, top, (*top, "strategy"))

    def trainer_in(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The section with the Trainer's arguments."""
        return _at(data, self.trainer)

    def beside(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What stands beside the Trainer's section; nothing where there is no such section."""
        if self.trainer == self.top:
            return {}
        return {
            key: value
            for key, value in _at(data, self.top).items()
            if (*self.top, key) not in (self.trainer, self.strategy)
        }

    @property
    def apart(self) -> bool:
        """Whether the strategy stands beside the Trainer's section, as in latent-diffusion."""
        return not self.bare and self.strategy[:-1] != self.trainer

    def apart_in(self, data: Mapping[str, Any]) -> Any:
        """The strategy that stands there."""
        return _at(data, self.top)[self.strategy[-1]]

    @property
    def bare(self) -> bool:
        """Whether the file itself is the strategy's class."""
        return self.strategy == self.trainer


class Built(NamedTuple):
    """A class and its arguments."""

    path: str
    key: str
    """Which word named the class; empty for only a name."""
    arguments: Mapping[str, Any]
    inside: Mapping[str, Path]
    """Where each argument stands below it."""
    others: tuple[str, ...] = ()
    """Keys beside the class and its section of arguments."""


def built(value: Any) -> Built | None:
    """A class with arguments, as jsonargparse or Hydra says it, or only its name; None for anything else."""
    if isinstance(value, str) and value:
        return Built(value, "", {}, {})
    if not isinstance(value, Mapping):
        return None
    key = next((word for word in CLASS if isinstance(value.get(word), str)), None)
    if key is None:
        return None
    beside = {str(name): item for name, item in value.items() if name not in (*CLASS, *ARGUMENTS)}
    sections = [word for word in ARGUMENTS if word in value]
    if not sections:
        return Built(value[key], key, beside, dict.fromkeys(beside, ()))
    arguments: dict[str, Any] = {}
    inside: dict[str, Path] = {}
    for word in sections:
        section = value[word] if isinstance(value[word], Mapping) else {}
        arguments |= {str(name): item for name, item in section.items()}
        inside |= dict.fromkeys(map(str, section), (word,))
    return Built(value[key], key, arguments, inside, tuple(beside))


def short(path: Any) -> str:
    """The last word of a dotted name, such as a class without its module."""
    return str(path).rpartition(".")[2]


def _section(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _at(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    found: Any = data
    for name in path:
        found = found[name]
    return found  # type: ignore[no-any-return]  # `of` has looked
