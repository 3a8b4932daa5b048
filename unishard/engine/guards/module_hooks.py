"""The hooks of the guards on modules: registered once for all guards, around the forwards that are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from unishard.engine.guards.guard import Due, Guard, Looks, WatchedModule


class ModuleHooks(Guard):
    """Tells the guards when a forward enters and leaves modules, outside the hooks of the engine and inside them."""

    looks = Looks.CLOSELY

    def __init__(self, modules: Sequence[WatchedModule], guards: Sequence[Guard]) -> None:
        """Register nothing yet.

        Args:
            modules: All that are not compiled.
            guards: In the order in which they are told.
        """
        self._modules, self._guards = modules, guards
        self._all = Due(Guard, guards)
        self._kept: dict[str, _Hooks] = {}
        """On modules of which a guard is told in every forward, by name."""

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """The block that runs a forward that is looked at."""
        hooks = {part.name: self._kept.get(part.name) or _Hooks(part) for part in self._modules}
        for each in hooks.values():
            each.told = self._all
        try:
            yield
        finally:
            for name, each in hooks.items():
                if asking := [guard for guard in self._guards if name in guard.always]:
                    each.told, self._kept[name] = Due(Guard, asking), each
                else:
                    each.remove()

    def close(self) -> None:
        """Remove the hooks."""
        for each in self._kept.values():
            each.remove()


class _Hooks:
    """The hooks on a module."""

    told: Due

    def __init__(self, part: WatchedModule) -> None:
        self._part, module = part, part.module
        self._handles = (
            module.register_forward_pre_hook(self._called, prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(self._entered, with_kwargs=True),
            module.register_forward_hook(self._left, prepend=True),
            module.register_forward_hook(self._returned, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for tell in self.told.called:
            args, kwargs = tell(self._part, args, kwargs) or (args, kwargs)
        return args, kwargs

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tell in self.told.entered:
            tell(self._part, args, kwargs)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        for tell in self.told.left:
            tell(self._part, output)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        for tell in self.told.returned:
            tell(self._part, output)
