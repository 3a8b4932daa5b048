"""Refuses a forward of a model whose parameters are on the meta device until `prepare`: it would compute nothing."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from unishard.errors import ModelError

_hooks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def refuse_forwards(model: nn.Module) -> None:
    """Let each module that has parameters raise an error in its forward."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            _hooks[module] = module.register_forward_pre_hook(_refuse)


def allow_forwards(model: nn.Module) -> None:
    """Undo it: `prepare` gives the model its data."""
    for module in model.modules():
        if (hook := _hooks.pop(module, None)) is not None:
            hook.remove()


def _refuse(module: nn.Module, args: Any) -> None:
    if any(parameter.is_meta for parameter in module.parameters(recurse=False)):  # not of a copy that has data
        raise ModelError(
            f"the {type(module).__name__} of a model from unishard.from_pretrained ran before unishard.prepare, which "
            "reads its weights; call engine = unishard.prepare(model, cfg), then engine(...)"
        )
