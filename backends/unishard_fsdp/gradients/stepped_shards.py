"""Step an optimizer on other tensors than the parameters: on plain tensors in place of DTensors, this rank's shards,
and on the master weights of whole parameters; `host_copies.py` on copies.

The dispatch of an operation on DTensors takes longer than the operation, and the first call of a fused kernel on n of
them takes n squared: it derives the placement of each entry from all entries (torch 2.13,
distributed/tensor/_sharding_prop.py). An update that is element-wise needs neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unishard_fsdp.private import PRIVATE_API
from unishard_fsdp.sharding.local_shards import local


class SteppedShards(ABC):
    """Tensors that an optimizer steps in place of parameters.

    Its groups and its state have them only while it steps: before and after, and in hooks of the user's on the
    optimizer, they have the parameters.
    """

    hooks = 2
    """How many hooks this has on the optimizer."""

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Prepare an optimizer that has not stepped yet, with the state that it may have created when it was
        constructed.

        Args:
            optimizer: Has the parameters.
            masters: The master weights of parameters that are no master weights themselves.
        """
        self.masters = masters
        self.optimizer: Any = optimizer
        """torch says of the keys of its state that they are tensors."""
        self.tensors: dict[nn.Parameter, nn.Parameter] = {
            parameter: self._new(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        """By parameter, the tensor that is stepped in its place."""
        self._parameters = {tensor: parameter for parameter, tensor in self.tensors.items()}
        for values in optimizer.state.values():
            values.update({name: self._moved(value) for name, value in values.items() if isinstance(value, Tensor)})
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        """The same entries as in the optimizer's state, by the tensors that are stepped."""
        self._shown: tuple[Any, list[list[Any]]] | None = None
        """While the optimizer steps, its state and the parameters of its groups."""
        self._stays = False
        """Whether it has the tensors until all calls of its step are made that are one update."""
        self._before = optimizer.register_step_pre_hook(lambda *_: self._enter())
        self._after = optimizer.register_step_post_hook(lambda *_: self._leave())
        _move(self._after, last=False)

    def step(self) -> None:
        """Update the parameters from their gradients. Not collective."""
        _move(self._before, last=True)
        try:
            self._update()
        finally:
            self._stays = False
            self._leave()

    def _update(self) -> None:
        """Call the optimizer's step."""
        self.optimizer.step()

    def before_change(self) -> None:  # noqa: B027 (nothing to do if gradients are where they are changed)
        """Called before gradients are changed that are final."""

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        self._before.remove()
        self._after.remove()

    @abstractmethod
    def _new(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor to step in place of a parameter."""

    @abstractmethod
    def _moved(self, value: Tensor) -> Tensor:
        """A value of the optimizer's state, for the tensor that is stepped."""

    @abstractmethod
    def _read(self) -> None:
        """Give the tensors the values and gradients of the parameters."""

    @abstractmethod
    def _write(self) -> None:
        """Give the parameters the values of the tensors, and drop the gradients of the latter."""

    def _weights(self, parameter: nn.Parameter) -> Tensor:
        """What is updated of a parameter on this rank."""
        return local(self.masters.get(parameter, parameter))

    @torch.no_grad()
    def _enter(self) -> None:
        if self._shown is not None:
            return
        optimizer = self.optimizer
        self._shown = optimizer.state, [group["params"] for group in optimizer.param_groups]
        if _differ(optimizer.state.values(), self._state.values()):
            self._state.clear()
            self._state.update({self.tensors[parameter]: entry for parameter, entry in optimizer.state.items()})
        optimizer.state = self._state
        for group in optimizer.param_groups:
            group["params"] = [self.tensors[parameter] for parameter in group["params"]]
        self._read()

    @torch.no_grad()
    def _leave(self) -> None:
        if self._shown is None or self._stays:
            return
        (state, groups), self._shown = self._shown, None
        optimizer = self.optimizer
        optimizer.state = state
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        if _differ(state.values(), self._state.values()):
            state.clear()
            state.update({self._parameters[tensor]: entry for tensor, entry in self._state.items()})
        self._write()


def _move(hook: Any, *, last: bool) -> None:
    """Let a hook run after those of the user's, or before them."""
    hook.hooks_dict_ref().move_to_end(hook.id, last=last)


def _differ(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) != len(others) or any(map(is_not, some, others))


class ShardViews(SteppedShards):
    """This rank's shards themselves, and whole parameters or their master weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Make tensors of their memory."""
        self._local: Callable[[Tensor], Tensor] = local
        if PRIVATE_API["local-tensors"].works:
            from unishard_fsdp.private.local_tensors import local_tensor

            self._local = local_tensor
        super().__init__(optimizer, masters)
        pairs = self.tensors.items()
        self._sharded = dict(pair for pair in pairs if isinstance(pair[0], DTensor))
        self._whole = dict(pair for pair in pairs if not isinstance(pair[0], DTensor))

    def _new(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self._weights(parameter).detach())

    def _moved(self, value: Tensor) -> Tensor:
        return local(value)

    def _read(self) -> None:
        for parameter, tensor in self._sharded.items():
            gradient = parameter.grad
            if gradient is not None:
                tensor.data = self._local(parameter)  # FSDP2 may have moved it (_fsdp_param.py, reset_sharded_param)
                tensor.grad = self._local(gradient)
        for parameter, tensor in self._whole.items():
            tensor.data, tensor.grad = self._weights(parameter), parameter.grad

    def _write(self) -> None:
        for parameter in self._whole.keys() & self.masters.keys():
            if self._whole[parameter].grad is not None:
                parameter.data.copy_(self.masters[parameter])
        for tensor in self.tensors.values():
            tensor.grad = None
