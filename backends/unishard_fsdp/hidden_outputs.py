"""Tensors that leave the forward of a sharded module where FSDP2 does not look for them.

It gathers a module for backward when the gradient of a tensor in its output arrives: in lists, tuples, dicts and
dataclasses (torch 2.13, fsdp/_common_utils.py, collect_grad_tensors). What is in another object, such as a
distribution, or in an attribute that the module sets, such as `self.aux_loss`, may come first: its backward would read
memory that was freed, and without another output no gradient would be reduced. A weight that a module returns is such
memory already in the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard_fsdp.gathering import own_leaves, reduce_late

_SCANNED = 3
"""Forwards of a module in which all attributes are looked at; later only those that had a tensor."""
_DEPTH = 3
"""How deep in objects."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class HiddenOutputs:
    """Finds them in each forward, and gathers their module before their backward."""

    def __init__(self, modules: Sequence[nn.Module], freed: Iterable[nn.Module]) -> None:
        """Register hooks.

        Args:
            modules: The sharded modules.
            freed: Those whose parameters are freed after each forward.
        """
        self._freed = {*freed}
        self._scans = dict.fromkeys(modules, 0)
        self._attributes: dict[nn.Module, dict[tuple[nn.Module, str], None]] = {module: {} for module in modules}
        self._without: set[nn.Module] = set()
        """Modules that were scanned, and have no such attribute."""
        self._leaves: dict[nn.Module, list[Tensor]] = {}
        """Of the modules with such tensors, the gathered parameters."""
        leave = torch.compiler.disable(self._leave)  # type: ignore[no-untyped-call]
        self._hooks = [module.register_forward_hook(leave, prepend=True) for module in modules]

    def reduce_late(self) -> None:
        """Reduce gradients that came after FSDP2 had reduced those of their module, or without it. Collective."""
        for module, leaves in self._leaves.items():
            reduce_late(module, leaves)

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()
        self._leaves = {}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module in self._without and type(output) is Tensor and getattr(output, "_base", None) is None:
            return None
        if torch.is_grad_enabled() and module in self._scans:  # a copy is not
            self._watch(module, [*self._in_attributes(module), *_in_objects(output)])
        return _copied(module, args, output) if module in self._freed else None

    def _watch(self, module: nn.Module, hidden: Collection[Tensor]) -> None:
        """Gather a module before the backward of tensors."""
        if hidden:
            self._leaves.setdefault(module, [*own_leaves(module)])
        for tensor in hidden:
            tensor.register_hook(partial(_gather, module))  # type: ignore[no-untyped-call]

    def _in_attributes(self, module: nn.Module) -> Iterator[Tensor]:
        found = self._attributes[module]
        if self._scans[module] < _SCANNED:
            self._scans[module] += 1
            for part in module.modules():
                for name, value in vars(part).items():
                    if name not in _OF_MODULES and any(map(_has_graph, tensors_in(value))):
                        found[part, name] = None
        elif not found:
            self._without.add(module)
        for part, name in found:
            yield from filter(_has_graph, tensors_in(vars(part).get(name)))


def copy_weights(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Let modules return copies of their own weights, whose memory is freed after the forward."""
    return [module.register_forward_hook(_copied, prepend=True) for module in modules]


def _copied(module: nn.Module, args: Any, output: Any) -> Any:
    """An output without weights of the module, or views of them."""
    return replace_tensors(output, lambda tensor: tensor.clone() if _is_weight(tensor) else tensor)


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(getattr(tensor, "_base", None), nn.Parameter)


def _in_objects(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """The tensors with a graph in objects that are no containers."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _in_objects(each, depth)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _in_objects(each, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, Tensor) and not callable(value):
        for each in vars(value).values():
            yield from filter(_has_graph, tensors_in(each))
            yield from _in_objects(each, depth - 1)


def _has_graph(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def _gather(module: nn.Module, gradient: Tensor) -> None:
    cast(FSDPModule, module).unshard()
