"""Find what modules do in a forward that is lost, or ends in torch, where an engine runs around each of them.

Around tensors in a list or a dict stage 3 of ZeRO puts functions of its own, and a cast replaces them, in a new
container: `aux.append(loss)` or `skips.pop()` in a block then never reaches the caller. A gradient that the forward
computes of its own, such as forces of an energy, is a backward for which no engine is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.loop.call_order import CallOrder
from unishard.errors import ModelError

_FIRST = 3
"""The updates that are looked at, in the first forward of each."""

_Copies = list[tuple[Any, Any]]
"""Containers that a module got in place of those of its caller, each with what it held then."""


class ModuleHabits:
    """Refuses changes of copies that the caller does not get back, and gradients in the forward."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        order: CallOrder,
        gathered: Collection[nn.Module],
        refuse_gradients: Callable[[], None],
    ) -> None:
        """Look at the first updates.

        Args:
            modules: All that are not compiled, by name and class.
            order: The engine's position in the loop.
            gathered: Those through which a forward may not compute gradients of its own.
            refuse_gradients: Raises where that is so.
        """
        self._modules = modules
        self._gathered = gathered
        self._order = order
        self._refuse_gradients = refuse_gradients
        self._running: list[tuple[dict[int, Any], _Copies]] = []
        """Of each module that runs: the containers of its caller, and the copies."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block that runs a training forward.

        Raises:
            ModelError: A copy was changed that is not returned.
            ContractError: The forward computes a gradient, where it cannot.
        """
        if self._order.updates >= _FIRST:
            yield
            return
        hooks = [hook for name, module in self._modules.items() for hook in self._watch(name, module)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running = []

    def _watch(self, name: str, watched: nn.Module) -> list[RemovableHandle]:
        """Register hooks outside the engine's, and one inside them."""

        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = (*args, *kwargs.values())
            self._running.append(({id(each): each for each in _containers(given)}, []))
            for tensor in tensors_in(given) if watched in self._gathered else ():
                if tensor.requires_grad:
                    tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

        def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
            own, copies = self._running[-1]
            copies += [(each, each.copy()) for each in _containers((*args, *kwargs.values())) if id(each) not in own]

        def left(module: nn.Module, args: Any, output: Any) -> None:
            changed = [each for each, before in self._running.pop()[1] if _differ(each, before)]
            if changed and not {id(each) for each in changed} & {id(each) for each in _containers((output,))}:
                raise ModelError(
                    f"{name} changes a {type(changed[0]).__name__} that it is passed, as aux.append(x) or skips.pop() "
                    "does, of which the engine has made a copy, so its caller would not see the change; return what it "
                    "adds, and let the caller change its own"
                )

        return [
            watched.register_forward_pre_hook(called, prepend=True, with_kwargs=True),
            watched.register_forward_pre_hook(entered, with_kwargs=True),
            watched.register_forward_hook(left, prepend=True),
        ]

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._order.inside_forward:
            self._refuse_gradients()


def _containers(values: tuple[Any, ...]) -> Iterator[Any]:
    """The lists and dicts in values."""
    for value in values:
        if isinstance(value, list | dict):
            yield value
        if isinstance(value, list | tuple):
            yield from _containers(tuple(value))
        elif isinstance(value, dict):
            yield from _containers(tuple(value.values()))


def _differ(now: Any, before: Any) -> bool:
    """Whether entries were added or replaced, or removed from a list. A dict is mostly the module's to empty."""
    if isinstance(now, dict):
        return any(key not in before or before[key] is not value for key, value in now.items())
    return len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True))
