"""What is done before and after FSDP2's own hooks in the forward of each sharded module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from unishard.contract.kit.forwards import recomputes
from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.errors import ModelError
from unishard_fsdp.units.backward_order import BackwardOrder

_requires_grad = attrgetter("requires_grad")
"""In C, since it is asked of parameters in every forward."""


class UnitForward:
    """The hooks of one sharded module."""

    def __init__(self, module: nn.Module, order: BackwardOrder, *, frees: bool) -> None:
        """Register those that run inside FSDP2's, before `fully_shard`.

        Args:
            module: Not sharded yet.
            order: Of the model's backward.
            frees: Whether its parameters are freed after each forward.
        """
        self._module, self._order, self._frees = module, order, frees
        self._leaves: dict[int, Tensor] = {}
        """The gathered parameters by position, which torch keeps from one gathering to the next."""
        self._passed: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the module is called with, while FSDP2's hook is given the token and the tensors in it."""
        self._returned = False
        """Whether FSDP2's hook is given the token beside the output."""
        self.hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(_eager(self._gathered), prepend=True, with_kwargs=True),
            module.register_forward_hook(_eager(self._computed)),
        ]

    def complete(self, prefix: str, leaves: dict[str, Tensor]) -> None:
        """Register the hooks that run around FSDP2's, after `fully_shard`.

        Args:
            prefix: Of the names of its parameters.
            leaves: Output, in the first forward: its gathered parameters by name.
        """
        self.hooks += [
            self._module.register_forward_pre_hook(_eager(self._enter), prepend=True, with_kwargs=True),
            self._module.register_forward_hook(_eager(self._leave)),
        ]
        slots = [*_slots(self._module, prefix)]
        self._names, self._leaves_by_name = [prefix + key for prefix, _, key in slots], leaves
        self._tables, self._keys = [table for _, table, _ in slots], [key for *_, key in slots]
        self._shards = self._values()
        self._own = {id(shard): shard for shard in self._shards}
        self._others: dict[int, Tensor] = {}
        """In this forward, the tensors that stand in for parameters, by position."""
        self._restores = False
        """Whether there were any in a forward."""

    def _values(self) -> list[Any]:
        return [*map(dict.get, self._tables, self._keys)]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before FSDP2 gathers the module.

        It would give the module copies of the lists, dicts and dataclasses around tensors, in which the caller would
        not see what the module adds (torch 2.13, fsdp/_common_utils.py, replace_grad_tensors).
        """
        now = map(id, map(dict.get, self._tables, self._keys))
        self._others = {} if self._own.keys() >= {*now} else self._find_others()
        token, self._passed = self._order.enter(module), None
        if token is None:
            return None
        self._passed, tensors = (args, kwargs), [token]
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Tensor):
                tensors.append(argument)
        return tuple(tensors), {}

    def _find_others(self) -> dict[int, Tensor]:
        """The tensors that stand in for parameters, as in `torch.func.functional_call`, by position.

        Raises:
            ModelError: The module recomputes its forward in backward, where they are not there any more.
        """
        others = {at: each for at, each in enumerate(self._values()) if each is not None and id(each) not in self._own}
        for at, value in [*others.items()]:
            if isinstance(value, DTensor) and isinstance(value, nn.Parameter):  # loaded, or made for a smaller mesh
                del others[at]
        self._restores = self._restores or bool(others)
        if others and torch.is_grad_enabled() and recomputes(self._module):
            raise ModelError(
                f"the forward that reads {self._names[min(others)]} was called with another tensor in place of it, as "
                "by torch.func.functional_call, and would be recomputed in backward with the parameter; leave its "
                "class out of activation_checkpointing, or set that to none"
            )
        return others

    def _gathered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """After FSDP2 has gathered the module, which puts its parameters where others may stand."""
        if not self._leaves:
            self._find_leaves()
        if self._restores:  # also the parameters, where the end of such a call has put shards over them
            for at, tensor in {**self._leaves, **self._others}.items():
                self._tables[at][self._keys[at]] = tensor
        if self._passed is None:
            return None
        (passed, named), self._passed = self._passed, None
        token, *tensors = args
        self._order.take(token)
        positional, following = [], iter(tensors)
        for argument in passed:
            positional.append(next(following) if isinstance(argument, Tensor) else argument)
        for name, argument in named.items():
            named[name] = next(following) if isinstance(argument, Tensor) else argument
        return tuple(positional), named

    def _find_leaves(self) -> None:
        for at, tensor in enumerate(self._values()):
            # A parameter shared with a module inside this one may be sharded now; it is found there.
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
                self._leaves[at] = self._own[id(tensor)] = self._leaves_by_name[self._names[at]] = tensor
                tensor.__dict__ = self._shards[at].__dict__  # what users have set on the parameter, or will

    def _computed(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Before FSDP2 frees the parameters."""
        if self._frees and (type(output) is not Tensor or getattr(output, "_base", None) is not None):
            output = replace_tensors(output, _readable)
        token = self._order.token
        # A hook cannot return None in place of another output.
        if token is None or output is None or not torch.is_grad_enabled():
            return output
        has_graph = (
            self._order.differs
            or any(map(_requires_grad, self._leaves.values()))
            or any(map(_requires_grad, tensors_in(output)))
        )
        self._returned = has_graph
        return (output, token.clone()) if has_graph else output

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After FSDP2 has freed the parameters."""
        if self._returned:
            output, self._order.token = output
            self._returned = False
        if module is self._order.outermost:
            self._order.leave(output)
        return output


class UnitForwards:
    """The hooks of all sharded modules of a model."""

    def __init__(self, root: nn.Module, device: torch.device, *, differs: bool = False) -> None:
        self.order = BackwardOrder(root, device, differs=differs)
        self.leaves: dict[str, Tensor] = {}
        """The gathered parameters, on which autograd accumulates; those that have been gathered."""
        self._prefixes = {module: f"{name}." if name else "" for name, module in root.named_modules()}
        self._units: list[UnitForward] = []

    @contextmanager
    def around(self, module: nn.Module, *, frees: bool) -> Iterator[None]:
        """A block that shards a module; `frees` as in `UnitForward`."""
        unit = UnitForward(module, self.order, frees=frees)
        self._units.append(unit)
        yield
        unit.complete(self._prefixes[module], self.leaves)

    def close(self) -> None:
        """Remove the hooks."""
        for unit in self._units:
            while unit.hooks:
                unit.hooks.pop().remove()
        self.order.forget()


def _eager(hook: Any) -> Any:
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def _slots(module: nn.Module, prefix: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where the parameters of a sharded module are, without those of sharded modules inside it."""
    table = vars(module)["_parameters"]
    for key, parameter in table.items():
        if parameter is not None:
            yield prefix, table, key
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _slots(child, f"{prefix}{name}.")


def _readable(tensor: Tensor) -> Tensor:
    """A copy of a weight or of a view of it, whose memory is freed after the forward; another tensor as it is."""
    base = getattr(tensor, "_base", None)
    return tensor.clone() if isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter) else tensor
