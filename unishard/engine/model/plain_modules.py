"""What the modules of a model were before it was prepared, so that they can be that again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from weakref import WeakSet

import torch
from torch import Tensor, nn

PREPARED: WeakSet[nn.Module] = WeakSet()
"""Models that are sharded in place, and their modules."""

_TENSORS = {"_parameters", "_buffers", "_modules"}
_HOOKS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict)} - _TENSORS
"""The attributes of a module that hold its hooks."""
_OF_ENGINES = ("_", "ds_")
"""How the names of attributes begin that engines add (torch 2.13, DeepSpeed 0.19.8)."""


class PlainModules:
    """Classes, hooks and attributes of a model's modules, and the dtypes of its parameters. Holds no tensor."""

    def __init__(self, model: nn.Module) -> None:
        """Look at a model that is not prepared yet."""
        self._parts = [
            (
                name,
                module,
                type(module),
                frozenset(vars(module)),
                {hooks: copy.copy(vars(module)[hooks]) for hooks in _HOOKS & vars(module).keys()},
                [*vars(module)["_parameters"]],
            )
            for name, module in model.named_modules()
        ]
        self.dtypes: Mapping[str, torch.dtype] = {name: each.dtype for name, each in _named(model)}
        """By name in the model, a tied parameter under each."""
        self._trainable = {name: each.requires_grad for name, each in _named(model)}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Make the modules plain again.

        Args:
            weights: Full tensors by name; tied names share one.
        """
        made: dict[int, nn.Parameter] = {}
        full = {
            name: made.setdefault(id(weights[name]), nn.Parameter(weights[name], requires_grad=trainable))
            for name, trainable in self._trainable.items()
        }
        for name, module, kind, attributes, hooks, own in self._parts:
            module.__class__ = kind
            for added in vars(module).keys() - attributes:
                if added.startswith(_OF_ENGINES) or callable(vars(module)[added]):
                    del vars(module)[added]
            vars(module).update(hooks)
            vars(module)["_parameters"] = {each: full.get(f"{name}.{each}" if name else each) for each in own}
            PREPARED.discard(module)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [*model.named_parameters(remove_duplicate=False)]
