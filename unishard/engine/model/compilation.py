"""`torch.compile` of a model's forward, in place.

Only `forward` is compiled, never `__call__`: the engines' hooks on the module run uncompiled, and no `_orig_mod`
appears in any name.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import nn

from unishard import config
from unishard.contract.kit.forwards import is_compiled
from unishard.contract.units import Unit
from unishard.engine.model.kv_cache import all_empty, caches_in, without_cache
from unishard.engine.model.units import find_blocks
from unishard.errors import ConfigError, ModelError, Problem

_logger = logging.getLogger("unishard")


def find(model: nn.Module, cfg: config.Compile, sharding: config.Sharding) -> list[Unit]:
    """Find the modules to compile: the blocks, or the model itself.

    Raises:
        ConfigError: torch has no such backend; lists the available ones.
        ModelError: The model has no blocks, or is already compiled.
    """
    if cfg.mode == "none":
        return []
    require_backend(cfg)
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ModelError(
                f"compile: {name or 'the model'} is already compiled (module.compile()); remove that, or set compile "
                "to none"
            )
    return [Unit("", model)] if cfg.mode == "full" else find_blocks(model, sharding, "compile")


def require_backend(cfg: config.Compile) -> None:
    """Check that torch has the backend that compiles.

    Raises:
        ConfigError: It has not; lists the available ones.
    """
    if cfg.backend not in torch.compiler.list_backends(exclude_tags=()):
        common = ", ".join(torch.compiler.list_backends())
        raise ConfigError([Problem("compile.backend", f"torch has no backend {cfg.backend!r}; choose one of {common}")])


def apply(modules: Sequence[Unit], cfg: config.Compile) -> None:
    """Compile the `forward` of modules, at the first call."""
    for unit in modules:
        _limits().files |= {
            getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(unit.module).__mro__
        }
        unit.module.forward = Compiled(unit.module.forward, cfg.backend, block=cfg.mode == "per_block")


def eager_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name that are not inside a compiled one, where torch would compile their hooks with it."""
    named = dict(model.named_modules())
    compiled = [module for module in named.values() if is_compiled(module)]
    inside = {id(inner) for module in compiled for inner in module.modules() if inner is not module}
    return {name: module for name, module in named.items() if id(module) not in inside}


class Compiled:
    """A compiled `forward`; a copy of its module compiles its own instead of calling the original module.

    A block is compiled without a key-value cache. Each layer indexes the cache differently, so torch would make a graph
    per layer, and stop compiling at the ninth (torch 2.13, `torch.compiler.config.recompile_limit`). In training,
    transformers models pass an empty cache to each block, which is removed; without gradients, as in `generate`, a
    block with a cache runs uncompiled.
    """

    compiles = True

    def __init__(self, function: Callable[..., Any], backend: str, *, block: bool) -> None:
        self._function = function
        self._backend = backend
        self._block = block
        self._run = torch.compile(function, backend=backend, fullgraph=False, dynamic=None)
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled function, or the function itself where a call brings a cache."""
        caches = caches_in(args, kwargs) if self._block else ()
        if caches and not torch.is_grad_enabled():
            return self._function(*args, **kwargs)
        if caches and all_empty(caches):
            args, kwargs = without_cache(args, kwargs)
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return Compiled(copy.deepcopy(self._function, memo), self._backend, block=self._block)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Compiled, block=self._block), (self._function, self._backend)


class _Limits(logging.Handler):
    """Logs one line when torch stops compiling a function of a model and runs it uncompiled; torch's own message has a
    dozen.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.files: set[str | None] = set()
        """Source files of the compiled modules' classes and bases; functions in other files, such as an engine's, are
        not reported."""
        self._reported: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if not str(record.msg).startswith("torch._dynamo hit config.") or len(arguments) < 4:
            return
        limit, number, function, reason = map(str, arguments[:4])
        if function in self._reported or not any(file and file in function for file in self.files):
            return
        self._reported.add(function)
        _logger.warning(
            "torch.compile made %s graphs of %s and runs its other calls uncompiled, which is slower; reason for the "
            "last graph: %s; use batches of one shape, set compile to none, or raise torch.compiler.config.%s",
            *(number, function, " ".join(reason.partition("\n")[0].split()), limit),
        )


@cache
def _limits() -> _Limits:
    limits = _Limits()
    logging.getLogger("torch._dynamo.convert_frame").addHandler(limits)
    return limits
