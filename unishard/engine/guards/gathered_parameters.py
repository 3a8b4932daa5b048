"""Find writes to what modules compute with: parameters that an engine has gathered, or rounded copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from unishard.engine.guards.guard import Guard, Looks
from unishard.engine.guards.parameter_writes import ParameterWrites
from unishard.engine.guards.tensor_marks import Mark, mark


class GatheredParameters(Guard):
    """Looks at what each module computes with, when it begins and when it ends; `ParameterWrites` raises.

    Without it: a forward that writes `parameter.data` of a gathered parameter loses that in silence.
    """

    looks = Looks.CLOSELY

    def __init__(self, parts: Mapping[str, nn.Module], written: ParameterWrites) -> None:
        """Look at nothing yet.

        Args:
            parts: The modules by name.
            written: Is told what each parameter was and what it is.
        """
        self._parts, self._written = parts, written
        self._running: dict[int, dict[str, Mark]] = {}
        """What each module that runs computes with."""
        self._seen: set[str] = set()
        """The names of what was gathered."""

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """The block that runs a forward that is looked at."""
        hooks = [hook for name, part in self._parts.items() for hook in self._around(name, part)]
        try:
            yield
        finally:
            self._running = {}
            for hook in hooks:
                hook.remove()

    def _around(self, name: str, part: nn.Module) -> Iterator[RemovableHandle]:
        """Register hooks between those of the engine, which gather and release."""
        yield part.register_forward_pre_hook(lambda module, args: self._enter(name, module))
        yield part.register_forward_hook(lambda module, args, output: self._leave(module), prepend=True)

    def _enter(self, prefix: str, module: nn.Module) -> None:
        empty = self._written.empty
        marks = self._running[id(module)] = {}
        for name, tensor in module.named_parameters(prefix):
            own = name.rpartition(".")[0] == prefix
            # What is empty at rest is gathered by now if it is the module's own; others may be on their way.
            if tensor.numel() and (own if empty.get(id(tensor)) else id(tensor) not in empty):
                marks[name] = mark(tensor, memory=True, bits=own or not prefix)

    def _leave(self, module: nn.Module) -> None:
        for name, was in self._running.pop(id(module), {}).items():
            self._written.compare(name, was, mark(was.tensor, memory=True, bits=was.bits is not None))
            if name not in self._seen:
                self._seen.add(name)
                self._written.add_gathered(name, was.tensor)
