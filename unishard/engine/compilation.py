"""`torch.compile` of a model's forward, in place.

Only `forward` is compiled, never `__call__`: the engines' hooks on the same module run as they do without compilation, and no
`_orig_mod` appears in any name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from unishard import config
from unishard.config import Config
from unishard.engine.units import Unit, find_blocks
from unishard.errors import ConfigError, ModelError, Problem

__all__ = ["apply", "find"]


def find(model: nn.Module, cfg: Config) -> list[Unit]:
    """The modules to compile: the blocks, or the model itself.

    Raises:
        ConfigError: torch has no such backend; lists those that it has.
        ModelError: The model has no blocks, or is compiled already.
    """
    if cfg.compile.mode == "none":
        return []
    known = torch.compiler.list_backends(exclude_tags=())
    if cfg.compile.backend not in known:
        common = ", ".join(torch.compiler.list_backends())
        raise ConfigError([Problem("compile.backend", f"torch has no backend {cfg.compile.backend!r}; choose one of {common}")])
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise ModelError(f"compile: {name or 'the model'} is compiled already (module.compile()); do so here or there, not twice")
    return [Unit("", model)] if cfg.compile.mode == "full" else find_blocks(model, cfg.sharding, "compile")


def apply(modules: Sequence[Unit], cfg: config.Compile) -> None:
    """Compile what modules do in `forward`, at the first call."""
    for unit in modules:
        unit.module.forward = Compiled(unit.module.forward, cfg.backend)


class Compiled:
    """A compiled function that a copy of its module compiles anew, instead of calling the module it was copied from."""

    def __init__(self, function: Callable[..., Any], backend: str) -> None:
        self._function = function
        self._backend = backend
        self._run = torch.compile(function, backend=backend, fullgraph=False, dynamic=None)
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return Compiled(copy.deepcopy(self._function, memo), self._backend)

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, (self._function, self._backend)
