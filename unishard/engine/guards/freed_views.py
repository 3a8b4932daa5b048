"""Find views of gathered weights that the script reads after the engine has freed the weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.nested_tensors import values_in
from unishard.engine.guards.guard import Guard, Looks, WatchedModule
from unishard.errors import ModelError

_DEPTH = 3
"""How deep in objects: a mixture of distributions holds distributions, which hold tensors."""
_OPAQUE = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType, str, int, float)
"""What is not looked into."""
_OF_TORCH = frozenset(vars(nn.Module()))
"""Names of what each module has."""


class KeptView(Tensor):
    """A view of a weight that outlives the forward of its module. Others see a tensor."""

    kept_by: str
    """The module that has kept it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise ModelError if memory is read that is not there; compute with a plain tensor otherwise."""
        if getattr(func, "__name__", "") == "__get__":  # an attribute, such as `shape` or `T`
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            for view in values_in((args, kwargs)):
                if isinstance(view, KeptView) and not view.untyped_storage().size():
                    raise ModelError(
                        f"{view.kept_by} keeps a view of a weight, of shape {tuple(view.shape)}, in an attribute or an "
                        "object, which is read now that the engine has freed the gathered weight, as after each "
                        "forward of its unit; keep a copy: view.clone()"
                    )
            return func(*args, **(kwargs or {}))


class FreedViews(Guard):
    """Marks the views of weights that a forward leaves in attributes and objects, so that they are not read too late.

    Without it: torch 2.13 ends in SIGSEGV, since FSDP2 frees the memory of a weight under its views.
    """

    looks = Looks.CLOSELY

    def returned(self, part: WatchedModule, output: Any) -> None:
        """Mark them."""
        # FSDP2 keeps what it knows of a module under names with `__`: thousands of objects, of which no script has one.
        own = [value for key, value in vars(part.module).items() if key not in _OF_TORCH and key[:2] != "__"]
        for tensor in _held([own, output], _DEPTH):
            if type(tensor) is Tensor and isinstance(tensor._base, nn.Parameter):
                tensor.__class__ = KeptView
                tensor.kept_by = part.title  # type: ignore[attr-defined]


def _held(value: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in containers, and in what objects hold."""
    for each in values_in(value):
        if isinstance(each, Tensor):
            yield each
        elif depth and not isinstance(each, _OPAQUE) and (inside := getattr(each, "__dict__", None)):
            yield from _held([*inside.values()], depth - 1)
