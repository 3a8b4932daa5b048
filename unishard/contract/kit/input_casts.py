"""Which floating-point inputs are cast to the compute dtype, the same for every engine.

By default all of the root, and of a unit its first argument, the hidden states: a table added to them in fp32 must not
make fp32 of all that follows. What a model passes beside them in fp32, such as rotary tables, stays as it is, as in
plain torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Precision
from unishard.contract.kit.kept_fp32 import all_kept, modules_kept
from unishard.distributed.dtypes import DTYPES
from unishard.distributed.nested_tensors import cast, tensors_in
from unishard.errors import ConfigError, Problem

_CHECKED = 4
"""Forwards of a module in which casts are compared with what was cast; that waits for the device, so later ones are
not."""

_LOW = (torch.bfloat16, torch.float16)
_keeps_outputs = False
"""Whether a block of `outputs_in_fp32` is open."""
_EXACT = 256
"""Up to here bf16 holds every whole number; fp16 does up to 2048."""


def check(modules: Iterable[nn.Module], cfg: Precision) -> None:
    """Check that the names in `precision.cast_inputs` are arguments of the modules that cast.

    Raises:
        ConfigError: One is not; lists those that are.
    """
    if isinstance(cfg.cast_inputs, bool):
        return
    known: dict[str, None] = {}
    for module in modules:
        arguments = signature(module.forward).parameters.values()
        if any(each.kind is Parameter.VAR_KEYWORD for each in arguments):
            return  # it takes any
        known |= dict.fromkeys(each.name for each in arguments)
    unknown = [name for name in cfg.cast_inputs if name not in known]
    if unknown:
        message = (
            f"no forward of the model or of its units has an argument {unknown[0]!r}; they have "
            f"{', '.join(known) or 'none'}"
        )
        raise ConfigError([Problem("precision.cast_inputs", message)])


def cast_inputs(modules: Iterable[nn.Module], cfg: Precision) -> list[RemovableHandle]:
    """Cast inputs of modules, positional and keyword, to the compute dtype before each forward; those of modules in
    fp32 to fp32.

    Args:
        modules: The root, and the units.
        cfg: The section `precision`; `cast_inputs` says which inputs.

    Returns:
        Handles of the hooks.
    """
    root, *units = modules
    if cfg.compute == "fp32":
        return []
    handles = []
    # transformers' models cast themselves around the modules that their classes name.
    for module in modules_kept(root) if cfg.keep_fp32 != "auto" else ():
        casts = _InFp32()
        handles.append(module.register_forward_pre_hook(casts.up, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(casts.back))
    # Before the module's other hooks, so that the engine's hooks get the cast inputs.
    for module in (root, *(unit for unit in units if not all_kept(unit))) if cfg.cast_inputs else ():
        handles.append(
            module.register_forward_pre_hook(_Cast(module, cfg, root=module is root), prepend=True, with_kwargs=True)
        )
    return handles


@contextmanager
def outputs_in_fp32() -> Iterator[None]:
    """A block in which modules in fp32 return what they computed, such as a loss, which 16 bits would round."""
    global _keeps_outputs
    before, _keeps_outputs = _keeps_outputs, True
    try:
        yield
    finally:
        _keeps_outputs = before


class _InFp32:
    """Hooks of a module that computes in fp32: inputs are cast to fp32, and then outputs to the dtype that the inputs
    had.
    """

    def __init__(self) -> None:
        self._given: torch.dtype | None = None
        """The 16-bit dtype of inputs of the forward that runs."""

    def up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self._given = next((each.dtype for each in tensors_in((args, kwargs)) if each.dtype in _LOW), None)
        return cast(args, torch.float32), cast(kwargs, torch.float32)

    def back(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self._given is None or _keeps_outputs else cast(output, self._given)


class _Cast:
    """A forward pre-hook that casts, and that warns once where a cast changes whole numbers."""

    def __init__(self, module: nn.Module, cfg: Precision, *, root: bool) -> None:
        self._dtype = DTYPES[cfg.compute]
        arguments = signature(module.forward).parameters.values()
        positional = [
            each.name for each in arguments if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._names = positional or ["input"]
        self._only: frozenset[str] | None = None
        """The arguments that are cast; None for all."""
        if not isinstance(cfg.cast_inputs, bool):
            self._only = frozenset(cfg.cast_inputs)
        elif not root:
            self._only = frozenset(self._names[:1])
        self._unchecked = _CHECKED

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._only is None:
            cast_args, cast_kwargs = cast(args, self._dtype), cast(kwargs, self._dtype)
        else:
            named = zip(self._names + [""] * len(args), args, strict=False)
            cast_args = tuple(self._one(name, value) for name, value in named)
            cast_kwargs = {name: self._one(name, value) for name, value in kwargs.items()}
        # A compiled forward must not read values.
        if not torch.compiler.is_compiling() and self._unchecked:
            self._unchecked -= 1
            before = dict(zip(self._names, args, strict=False)) | kwargs
            self._compare(module, before, dict(zip(self._names, cast_args, strict=False)) | dict(cast_kwargs))
        return cast_args, cast_kwargs

    def _one(self, name: str, value: Any) -> Any:
        return cast(value, self._dtype) if self._only is not None and name in self._only else value

    def _compare(self, module: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name, value in before.items():
            for original, rounded in zip(tensors_in(value), tensors_in(after[name]), strict=True):
                changed = None if original is rounded else _changed(original, rounded)
                if changed is not None:
                    self._unchecked = 0
                    _warn(module, name, *changed)
                    return


def _changed(value: Tensor, rounded: Tensor) -> tuple[float, float] | None:
    """A whole number that a cast has changed, and what it has become."""
    if type(value) is not Tensor or value.is_meta:  # a plan's tensors have no values
        return None
    whole = (value.abs() > _EXACT) & (value == value.round()) & value.isfinite() & (rounded.to(value.dtype) != value)
    if not bool(whole.any()):
        return None
    return float(value[whole][0]), float(rounded[whole][0])


def _warn(module: nn.Module, argument: str, number: float, rounded: float) -> None:
    if dist.is_initialized() and dist.get_rank():
        return
    where = getattr(module.forward, "__qualname__", type(module).__name__)  # FSDP2 renames the class
    warnings.warn(
        f"precision.cast_inputs rounds whole numbers of {argument}, an argument of {where}: {number:g} becomes "
        f"{rounded:g}; if they are "
        "timesteps or positions, name only the other arguments in precision.cast_inputs, or pass integers",
        RuntimeWarning,
        stacklevel=2,
    )
