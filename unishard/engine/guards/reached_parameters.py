"""Compare which parameters the ranks' losses reach.

Before a backward that reduces, in the updates that are looked at, where the graph of the loss tells; after the last
backward of every window, where the gradients tell, together with the calls that the ranks compare.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

from torch import Tensor

from unishard.contract.adapter import Updates
from unishard.engine.guards.graph import leaves_of
from unishard.engine.guards.guard import Guard
from unishard.engine.place import LoopPlace
from unishard.failures.compared_call import ComparedCall

_NAMED = 8
_CONTAINERS = ("ModuleList", "ModuleDict", "Sequential")


class ReachedParameters(Guard):
    """Describes the parameters that this rank's losses do not reach in an accumulation window.

    Without it: where the ranks' losses reach different ones, gradients of different parameters are added up, or the
    ranks wait for each other without end.
    """

    def __init__(self, updates: Updates, place: LoopPlace, classes: Mapping[str, str]) -> None:
        """Before the first window.

        Args:
            updates: Of the sharded model.
            place: Where the loop is.
            classes: Class of each module by name, before the model was sharded.
        """
        self._updates = updates
        self._place = place
        self._classes = classes
        self._reached: set[str] = set()
        self._described: tuple[tuple[str, ...], str] = ((), "")
        """The last names that were described, mostly those of every update."""

    def before_backward(self, loss: Tensor, call: ComparedCall) -> None:
        """Add what will have no gradient after a backward that reduces."""
        if not self._place.looks_at_update:
            return
        leaves = self._updates.leaves()
        names = {id(leaves.get(name, each)): name for name, each in self._updates.shared_parameters.items()}
        if self._updates.reduces_each_backward:
            self._reached.clear()
        self._reached |= {names[id(leaf)] for leaf in leaves_of(loss) if id(leaf) in names}
        if call.last or self._updates.reduces_each_backward:
            reached, self._reached = self._reached, set()
            call.skipped = self._describe([name for name in names.values() if name not in reached])

    def before_step(self, call: ComparedCall) -> None:
        """Add what has no gradient at the end of a window."""
        if call.last:
            call.skipped = self._describe(self._updates.without_gradient())

    def forget(self) -> None:
        """Forget the window."""
        self._reached.clear()

    def _describe(self, names: Collection[str]) -> str:
        key = tuple(names)
        if key != self._described[0]:
            self._described = key, self._in_words(key)
        return self._described[1]

    def _in_words(self, names: Collection[str]) -> str:
        """The outermost modules of which no parameter has a gradient, by name and class, and other parameters."""
        missing = set(names)
        others = [name for name in self._updates.shared_parameters if name not in missing]
        parts = dict.fromkeys(self._part(name, others) for name in names)
        shown = ", ".join([*parts][:_NAMED])
        rest = len(parts) - _NAMED
        return f"{shown} and {rest} more ({zlib.crc32(repr(tuple(parts)).encode()):08x})" if rest > 0 else shown

    def _part(self, name: str, others: Collection[str]) -> str:
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            module = ".".join(path[:depth])
            if self._classes.get(module, "") not in _CONTAINERS and not any(
                other.startswith(f"{module}.") for other in others
            ):
                return f"{module} ({self._classes.get(module, 'Module')})"
        return f"{name} ({self._classes.get('.'.join(path), 'Module')})" if path else name  # the root cannot be skipped
