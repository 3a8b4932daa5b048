"""Find lists and dicts that a module changes, and of which its caller does not get the change.

Around tensors in a list or a dict stage 3 of ZeRO puts functions of its own, and a cast replaces them, in a
new container: `aux.append(loss)` or `skips.pop()` in a block then never reaches the caller.
"""

from __future__ import annotations

from typing import Any

from unishard.distributed.nested_tensors import values_in
from unishard.engine.guards.guard import Guard, Looks, WatchedModule
from unishard.engine.open_blocks import OpenBlocks
from unishard.errors import ModelError


class CopiedContainers(Guard):
    """Refuses changes of copies that the caller does not get back.

    All modules are looked at where `Sampling` says, and in every micro-batch those that were seen to get containers: an
    empty list may be copied only once it has a tensor.

    Without it: stage 3 of ZeRO trains without the loss that a block appends to its caller's list, in silence.
    """

    looks = Looks.CLOSELY

    def __init__(self, blocks: OpenBlocks) -> None:
        """Look at nothing yet.

        Args:
            blocks: Those in which the run is.
        """
        self.always: set[str] = set()
        self._blocks = blocks
        self._passed: dict[str, list[Any]] = {}
        """The containers of the caller of each module that runs."""
        self._copies: dict[str, list[tuple[Any, Any]]] = {}
        """What it got in place of some of them, each with what it held then."""

    def called(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Keep what the caller passes."""
        if self._blocks.forward:  # not where a backward computes it again
            self._passed[part.name] = _containers((*args, *kwargs.values()))
            self.always.update([part.name] if self._passed[part.name] else [])

    def entered(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Keep what the module gets instead."""
        passed = {id(each) for each in self._passed.pop(part.name, ())}
        if self._blocks.forward:
            own = _containers((*args, *kwargs.values()))
            self._copies[part.name] = [(each, _shallow(each)) for each in own if id(each) not in passed]

    def left(self, part: WatchedModule, output: Any) -> None:
        """Compare.

        Raises:
            ModelError: A copy was changed that is not returned.
        """
        changed = [each for each, before in self._copies.pop(part.name, ()) if _differ(each, before)]
        if changed and not {id(each) for each in changed} & {id(each) for each in _containers(output)}:
            raise ModelError(
                f"{part.title} changes a {type(changed[0]).__name__} that it is passed, as aux.append(x) or "
                "skips.pop() does, of which the engine has made a copy, so its caller would not see the change; return "
                "what it adds, and let the caller change its own"
            )


def _containers(value: Any) -> list[Any]:
    """The lists and dicts in a value."""
    return [each for each in values_in(value) if isinstance(each, list | dict)]


def _shallow(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else [*container]


def _differ(now: Any, before: Any) -> bool:
    """Whether entries were added or replaced, or removed from a list. A dict is mostly the module's to empty."""
    if isinstance(now, dict):
        return any(key not in before or before[key] is not value for key, value in now.items())
    return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))
