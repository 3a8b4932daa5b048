"""Compare the options of the optimizer between the ranks, which a script may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from unishard.engine.guards.guard import Guard
from unishard.engine.place import LoopPlace
from unishard.failures.collective_check import samples
from unishard.failures.compared_call import ComparedCall


class EqualOptions(Guard):
    """Adds them to updates whose calls are compared.

    Without it: a learning rate that is written on one rank only lets the ranks train parts of different models.
    """

    def __init__(self, groups: Callable[[], Sequence[Mapping[str, Any]]], place: LoopPlace) -> None:
        """Look at nothing yet.

        Args:
            groups: Those of the optimizer.
            place: Where the loop is.
        """
        self._groups, self._place = groups, place

    def before_step(self, call: ComparedCall) -> None:
        """Add the options."""
        if call.last and samples(self._place.updates):
            call.held |= _options(self._groups())


def _options(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The options by name: one value where all groups have the same, else a list."""
    options: dict[str, list[Any]] = {}
    for group in groups:
        for name, value in group.items():
            if name != "params" and (plain := _plain(value)) is not None:
                options.setdefault(name, []).append(plain)
    return {
        name: str(values[0] if all(value == values[0] for value in values) else values)
        for name, values in options.items()
    }


def _plain(value: Any) -> Any:
    """A number, or a tuple of numbers; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return tuple(value) if value and all(isinstance(each, int | float) for each in value) else None
    return value if isinstance(value, int | float) else None
