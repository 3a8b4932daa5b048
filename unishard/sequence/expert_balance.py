"""The load-balancing loss of experts, over all positions of a group.

It is no sum over positions: it multiplies each expert's share of the tokens by its mean probability. transformers'
models of experts compute it by a function of their own module, `load_balancing_loss_func` (5.23).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from unishard.sequence.exchange import gather_plain, gather_positions
from unishard.sequence.group import SequenceGroup

_FUNCTION = "load_balancing_loss_func"
_FIRST = "transformers.models.mixtral.modeling_mixtral"
"""Whose function TRL's forward calls for every model of transformers (1.16)."""


class ExpertBalance:
    """Gives the function the routers' logits of the whole group while a model runs."""

    def __init__(self, model: nn.Module, group: SequenceGroup) -> None:
        self._group = group
        names = {type(module).__module__ for module in model.modules()}
        names = {name for name in names if hasattr(sys.modules.get(name), _FUNCTION)}
        names |= {_FIRST for name in names if name.startswith("transformers")}
        self._modules = [import_module(name) for name in names]
        configs = [getattr(module, "config", None) for module in model.modules()]
        self.asked = any(getattr(config, "output_router_logits", False) for config in configs)
        """Whether the model's loss has such a part."""
        self._own: list[Callable[..., Any]] = []

    def begin(self) -> None:
        """Before a forward."""
        self._own = [getattr(module, _FUNCTION) for module in self._modules]
        for module, own in zip(self._modules, self._own, strict=True):
            setattr(module, _FUNCTION, partial(_over_group, own, self._group))

    def end(self) -> None:
        """After it, also after an error."""
        for module, own in zip(self._modules, self._own, strict=False):
            setattr(module, _FUNCTION, own)
        self._own = []


def _over_group(own: Callable[..., Any], group: SequenceGroup, gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(gate_logits, tuple):
        return own(gate_logits, *args, **kwargs)
    logits = tuple(_gathered(layer, group) for layer in gate_logits)
    args = tuple(_of_group(each, group) for each in args)
    return own(logits, *args, **{key: _of_group(each, group) for key, each in kwargs.items()})


def _gathered(logits: Tensor, group: SequenceGroup) -> Tensor:
    """`[tokens * size, experts]`, the ranks one after the other."""
    return gather_positions(logits.reshape(1, 1, -1, logits.shape[-1]), group)[0, 0]


def _of_group(argument: Any, group: SequenceGroup) -> Any:
    """The attention mask, `[batch, positions]`, in the order of the logits; other arguments as they are."""
    if isinstance(argument, Tensor) and argument.dim() == 2:
        return torch.cat(gather_plain(argument, group))
    return argument
