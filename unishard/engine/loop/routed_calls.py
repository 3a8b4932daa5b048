"""Make the model itself the engine's entry: a call of it, of a method or of a part of it runs through the engine.

For frameworks that hold a model and call it. The model keeps its identity; its class becomes a subclass, so that
`isinstance` and the class's name stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

from unishard.engine.open_blocks import OpenBlocks
from unishard.errors import ContractError

_SHARDED = "FSDP"
"""Prefix of the class that `fully_shard` gives a module (torch 2.13)."""


class RoutedCalls:
    """Sends calls of a model to its engine until it is closed."""

    def __init__(
        self,
        module: nn.Module,
        blocks: OpenBlocks,
        run: Callable[..., Any],
        generate: Callable[..., Any],
        require_shared: Callable[..., None],
    ) -> None:
        """Route nothing yet.

        Args:
            module: A prepared model.
            blocks: Whether a forward of the engine runs, in which calls are the model's own.
            run: The engine's forward.
            generate: The engine's.
            require_shared: Checks what is passed to a model that generates inside a forward.
        """
        self._module = module
        self._blocks = blocks
        self._run, self._generate, self._require_shared = run, generate, require_shared
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        self._entered = False
        """Whether the model's own call runs."""

    def open(self, methods: Iterable[str], parts: Iterable[str], *, itself: bool = True) -> nn.Module:
        """Route calls of the model, of the named methods, and of the named parts.

        Args:
            methods: Names.
            parts: Likewise.
            itself: Whether the model's own call is routed; else it only runs what is written in its forward.

        Raises:
            ContractError: There is no such method or part.
        """
        self.close()
        named = {name: getattr(type(self._module), name, None) for name in methods}
        modules = dict(self._module.named_modules())
        for name, method in (*named.items(), *((part, modules.get(part)) for part in parts)):
            if not callable(method):
                raise ContractError(f"routed: {type(self._module).__name__} has no method or part {name!r}")
        own = {name: self._method(name) for name in named}
        self._replace(self._module, own | {"__call__": self._call(itself)})
        for part in parts:
            if part:
                self._replace(modules[part], self._calls_of_part(modules[part]))
        return self._module

    def close(self) -> None:
        """Give the classes back."""
        while self._classes:
            module, kind = self._classes.popitem()
            module.__class__ = kind

    def _replace(self, module: nn.Module, methods: dict[str, Any]) -> None:
        kind = type(module)
        name = kind.__name__.removeprefix(_SHARDED)
        names = {"__module__": kind.__module__, "__qualname__": name, "__doc__": kind.__doc__}
        self._classes[module] = kind
        module.__class__ = type(name, (kind,), names | methods)

    def _call(self, itself: bool) -> Callable[..., Any]:
        own = type(self._module).__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._blocks.forward:
                return (self._run if itself else module.forward)(*args, **kwargs)
            if self._entered:  # in its forward, or a method in place of it; hooks of engines would reshard under that
                return module.forward(*args, **kwargs)
            self._entered = True
            try:
                return own(module, *args, **kwargs)
            finally:
                self._entered = False

        return __call__

    def _method(self, name: str) -> Callable[..., Any]:
        own: Callable[..., Any] = getattr(type(self._module), name)

        @wraps(own)  # frameworks look at its parameters
        def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._blocks.forward:
                return own(module, *args, **kwargs)
            act = MethodType(own, module)
            with self._forward_is(act, act):
                return self._run(*args, **kwargs)

        return method

    def _calls_of_part(self, part: nn.Module) -> dict[str, Callable[..., Any]]:
        calls = {"__call__": self._call_of_part(part)}
        own = getattr(type(part), "generate", None)
        if callable(own):
            calls["generate"] = self._generate_of_part(part, own)
        return calls

    def _generate_of_part(self, part: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def generate(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not part:
                return own(module, *args, **kwargs)
            if self._blocks.forward:
                self._require_shared(*args, *kwargs.values())
                return own(module, *args, **kwargs)
            with self._replaced("generate", MethodType(own, part)):
                return self._generate(*args, **kwargs)

        return generate

    @contextmanager
    def _replaced(self, name: str, act: Callable[..., Any]) -> Iterator[None]:
        """A block in which the model has an attribute of its own."""
        own = vars(self._module)
        before = own.get(name)
        own[name] = act
        try:
            yield
        finally:
            own.pop(name, None)
            if before is not None:
                own[name] = before

    def _call_of_part(self, part: nn.Module) -> Callable[..., Any]:
        own = type(part).__call__

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._blocks.forward or module is not part:
                return own(module, *args, **kwargs)
            with self._forward_is(MethodType(own, part), part.forward):
                return self._run(*args, **kwargs)

        return __call__

    @contextmanager
    def _forward_is(self, act: Callable[..., Any], like: Callable[..., Any]) -> Iterator[None]:
        """A block in which the model's forward is something else: the engine runs it inside its own hooks.

        Args:
            act: What it does then.
            like: What has the parameters that it takes.
        """
        own = vars(self._module)
        before = own.get("forward")

        @wraps(like)
        def forward(*args: Any, **kwargs: Any) -> Any:
            restore()
            try:
                return act(*args, **kwargs)
            finally:
                own["forward"] = forward

        def restore() -> None:
            own.pop("forward", None)
            if before is not None:
                own["forward"] = before

        own["forward"] = forward
        try:
            yield
        finally:
            restore()
