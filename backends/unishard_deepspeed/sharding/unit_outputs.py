"""Stage 3: outputs of modules in which DeepSpeed does not look for tensors.

It gathers a module for backward when the gradient of a tensor arrives that the module has returned: in a tensor, list,
tuple or dict. Around the tensors of another object it does nothing, and a number or a generator ends its hook
(DeepSpeed 0.19.8, runtime/zero/parameter_offload.py, _post_forward_module_hook).
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.contract.units import Unit
from unishard.distributed.nested_tensors import replace_tensors
from unishard.errors import ModelError

_DEPTH = 3
"""How deep in objects."""
_OPAQUE = (nn.Module, type, FunctionType, MethodType, ModuleType)
"""What is not looked into."""


class ListedOutputs:
    """Gives DeepSpeed's hooks a list of the tensors, and puts what they make of these back."""

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        """Register the hooks before DeepSpeed's, and behind those of the user.

        Args:
            model: Not given to DeepSpeed yet.
            units: The modules whose parameters are gathered together.
        """
        leaves = [unit.module for unit in units]
        inside = {id(part) for leaf in leaves for part in leaf.modules() if part is not leaf}
        self._modules = {name: part for name, part in model.named_modules() if id(part) not in inside}
        self._gathered = {
            name
            for name, part in self._modules.items()
            if any(part is leaf for leaf in leaves) or next(part.parameters(recurse=False), None) is not None
        }
        self._outputs: dict[str, Any] = {}
        """What modules have returned, while DeepSpeed's hooks run."""
        self._hooks = [
            part.register_forward_hook(_without_self(self._list, name)) for name, part in self._modules.items()
        ]

    def restore(self) -> list[RemovableHandle]:
        """Register the hooks behind DeepSpeed's; all hooks."""
        behind = [
            part.register_forward_hook(_without_self(self._put_back, name)) for name, part in self._modules.items()
        ]
        return self._hooks + behind

    def _list(self, name: str, output: Any) -> Any:
        return None if type(output) is Tensor or _is_known(output) else self._listed(name, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _listed(self, name: str, output: Any) -> list[Tensor]:
        if isinstance(output, GeneratorType) and name in self._gathered:
            raise ModelError(
                f"{name} ({type(self._modules[name]).__name__}) returns a generator, whose code runs after the "
                "forward, when its weights are not gathered; return a list of what it yields"
            )
        tensors: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        _exchange(output, keep)
        self._outputs[name] = output
        return tensors

    def _put_back(self, name: str, output: Any) -> Any:
        if name not in self._outputs:
            return None
        tensors = iter(output)
        return _exchange(self._outputs.pop(name), lambda tensor: next(tensors))


def _without_self(act: Callable[[str, Any], Any], name: str) -> Callable[..., Any]:
    """A hook that is a function, not a method: a copy of the model must not copy the engine."""
    return lambda module, args, output: act(name, output)


def _is_known(output: Any) -> bool:
    """Whether DeepSpeed finds the tensors of an output."""
    if isinstance(output, dict):
        return all(isinstance(key, str) and not _is_dataclass(value) for key, value in output.items())
    if isinstance(output, list | tuple):
        return not any(map(_is_dataclass, output))
    return output is None or isinstance(output, Tensor)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, dict)


def _exchange(value: Any, change: Callable[[Tensor], Tensor], depth: int = _DEPTH) -> Any:
    """Replace the tensors in a value: in a container as `replace_tensors` does, in another object in place."""
    if isinstance(value, Tensor | dict | UserDict | list | tuple) or _is_dataclass(value):
        return replace_tensors(value, change)
    for name in _attributes(value) if depth and not isinstance(value, _OPAQUE) else ():
        inner = getattr(value, name)
        if (new := _exchange(inner, change, depth - 1)) is not inner:
            object.__setattr__(value, name, new)
    return value


def _attributes(value: Any) -> list[str]:
    """Names of what an object holds, in `__dict__` or slots."""
    slots = [slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ())]
    return [*getattr(value, "__dict__", ()), *(slot for slot in slots if slot[:2] != "__" and hasattr(value, slot))]
