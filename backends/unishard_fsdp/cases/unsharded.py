"""Sharded modules whose parameters stay gathered in a block of `engine.weights.unsharded`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unishard.contract.kit.replicated import is_replicated
from unishard_fsdp.cases.case import FSDPCase
from unishard_fsdp.units.dimensionless import parameter_named
from unishard_fsdp.units.forward_methods import run_as_forward
from unishard_fsdp.units.unit_parameters import own_names

_OF_DTENSOR = (
    "mixed torch.Tensor and DTensor",
    "for tensor subclasses",
    "remove or reshape sharded dimension",
    "along the sharded dimension",
    "Sharding propagation failed",
    "appears to not have been used in the graph",
)
"""In torch 2.13's errors for operations on a parameter that is not gathered (torch/distributed/tensor/_dispatch.py,
_ops/_view_ops.py; torch/_tensor.py), or on its gradient, where the forward computes with the gathered one."""


def sharded_read(error: RuntimeError, units: Sequence[str]) -> str | None:
    """What helps against the error of an operation on a shard; None for other errors."""
    if not any(text in str(error) for text in _OF_DTENSOR):
        return None
    if not units:
        return ""
    return (
        f"the units are {', '.join(units[:8])}: name only the classes of the blocks in sharding.units, so that weights "
        "used elsewhere, such as an embedding's, stay with the root"
    )


@final
class UnshardedModules(FSDPCase):
    """Keeps sharded modules gathered in a block, and reduces the gradients of reads that FSDP2 does not expect."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        """Find the modules that hold these parameters."""
        self.modules = list(dict.fromkeys(_owner(module, name) for name in names))
        self._leaves: list[Tensor] = []

    @contextmanager
    def gathered(self, *, reshards: bool) -> Iterator[None]:
        """The block. Collective.

        Args:
            reshards: Whether backward reshards modules after it.
        """
        # A number in reshard_after_forward has no public setter, so what was resharded after a forward is gathered
        # again at once.
        hooks = [cast(nn.Module, module).register_forward_hook(_unshard) for module in self.modules]
        try:
            self.after_reshard()
            self._leaves = [leaf for module in self.modules for leaf in _own_leaves(cast(nn.Module, module))]
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._set_reshard_after_backward(reshards)
            for module in self.modules:
                module.reshard()

    def after_reshard(self) -> None:
        """Gather the modules again."""
        for module in self.modules:
            module.unshard()

    def before_forward(self) -> None:
        """Keep them in a backward: the forward may compute gradients of its own."""
        self._set_reshard_after_backward(False)

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Keep them in the last backward of a window too, and reduce gradients that came after FSDP2 had reduced those
        of their module.

        It does so once the inputs of the module have their gradients. A read that was made before the module's forward
        gets its gradient only then, and the gradient would wait for the next backward.
        """
        self._set_reshard_after_backward(False)
        yield
        if self.modules:
            _reduce_late(cast(nn.Module, self.modules[0]), self._leaves)

    def _set_reshard_after_backward(self, reshard: bool) -> None:
        for module in self.modules:
            module.set_reshard_after_backward(reshard, recurse=False)


def _owner(root: nn.Module, name: str) -> FSDPModule:
    """The sharded module around a parameter that is nearest to it."""
    owner = module = root
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if isinstance(module, FSDPModule):
            owner = cast(nn.Module, module)
    return cast(FSDPModule, owner)


def _unshard(module: Any, *forward: Any) -> None:
    module.unshard()


def _own_leaves(owner: nn.Module) -> Iterator[Tensor]:
    """The gathered parameters of a sharded module, without those of sharded modules inside it."""
    for name in own_names(owner):
        parameter = parameter_named(owner, name)
        # Else a module inside this one shards it, or none does.
        if not isinstance(parameter, DTensor) and not is_replicated(parameter):
            yield parameter


def _reduce_late(module: nn.Module, leaves: Iterable[Tensor]) -> None:
    """Reduce gradients that FSDP2 has left on gathered parameters after a backward. Collective.

    An empty forward of one module makes FSDP2 go through all of them (torch 2.13, _fsdp_state.py,
    _root_post_backward_final_callback).

    Args:
        module: What `fully_shard` was called on.
        leaves: The gathered parameters.
    """
    late = next((leaf for leaf in leaves if leaf.grad is not None), None)
    if late is not None:
        empty = torch.zeros((), device=late.device, requires_grad=True)
        run_as_forward(module, torch.clone, empty).backward()
