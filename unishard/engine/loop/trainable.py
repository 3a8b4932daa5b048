"""Parameters that stop training, and train again, in mid-run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from unishard.distributed import process_group
from unishard.errors import ContractError

__all__ = ["Freezing", "Trainability"]


class Freezing:
    """Knows which parameters may train: those that were trainable when the model was prepared, and so have a master on every engine."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.prepared = {name for name, parameter in self._named().items() if parameter.requires_grad}
        """Every name of the parameters that may train."""

    def choose(self, names: str | Iterable[str], trainable: bool) -> list[str]:
        """All names of the parameters that `names` mean. Collective.

        Args:
            names: As in `Engine.set_trainable`.
            trainable: What they are to be.

        Raises:
            ContractError: A name matches nothing, a parameter was frozen when the model was prepared, or none would be left to train.
            RankMismatchError: The ranks give different names.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        process_group.agree({"names": wanted, "trainable": trainable}, "calls of set_trainable")
        named = self._named()
        meant = {named[found] for name in wanted for found in self._matches(name, named)}
        chosen = [name for name, parameter in named.items() if parameter in meant]
        frozen = [name for name in chosen if name not in self.prepared]
        if trainable and frozen:
            raise ContractError(
                f"{frozen[0]} was frozen when the model was prepared, so it has no fp32 master and no place in the optimizer; leave it "
                "trainable in prepare, and call engine.set_trainable(..., False) until its time comes"
            )
        if not trainable and not any(parameter.requires_grad for parameter in named.values() if parameter not in meant):
            raise ContractError(f"set_trainable({names!r}, False) would freeze all that is left to train; leave some parameter trainable")
        return chosen

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def _matches(self, name: str, named: dict[str, nn.Parameter]) -> list[str]:
        matches = [each for each in named if each == name or each.startswith(f"{name}.") or fnmatchcase(each, name)]
        if not matches:
            near = get_close_matches(name, [*named, *(each for each, _ in self._module.named_modules() if each)], 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "engine.module.named_parameters() lists the names"
            raise ContractError(f"set_trainable: no parameter or module is called {name!r}; {hint}")
        return matches


class Trainability(ABC):
    """Lets parameters stop training and train again. `TrainingEngine` inherits it."""

    _module: nn.Module
    _freezing: Freezing

    @abstractmethod
    def _enter(self, call: str, detail: str = "") -> None: ...

    @abstractmethod
    def _require_boundary(self, call: str) -> None: ...

    def set_trainable(self, names: str | Iterable[str], trainable: bool = True) -> None:
        """Freeze parameters, or let them train (again), from the next accumulation window on. Collective.

        What plain torch does when `requires_grad` is toggled and gradients are None: a frozen parameter keeps its value and its
        optimizer state, without decay, and one that has never trained starts with fresh state and a step count of its own.

        Args:
            names: Names of parameters, of modules (all their parameters) or patterns such as `*.lora_A.*`; a tied parameter has
                several names, and each of them means it. Only what was trainable when the model was prepared may train.
            trainable: Whether they train.

        Raises:
            ContractError: Inside a window, a name matches nothing, a parameter was frozen in `prepare`, or none is left to train.
            RankMismatchError: The ranks give different names.
        """
        self._require_boundary("set_trainable")
        self._enter("set_trainable")
        self._set_trainable(self._freezing.choose(names, trainable), trainable)

    def _set_trainable(self, names: Sequence[str], trainable: bool) -> None:
        """Freeze parameters or let them train, between two windows. Those without gradient must not move in an update."""
        for name in names:
            self._module.get_parameter(name).requires_grad_(trainable)
