"""Find in-place operations on inputs of units, and on outputs that are views.

Both engines put functions of their own around a unit's inputs and outputs, to gather and reduce in backward. What is
written in place there bypasses them: torch refuses an input under FSDP2, whose backward also misses the hook of an
output that is a view, and stage 3 of ZeRO trains with a gradient without the operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.loop.call_order import CallOrder
from unishard.errors import ModelError

_FIRST = 3
"""The updates that are looked at, in the first forward of each."""
_REFUSAL = "This view was created inside a custom Function"
"""In torch's error for an in-place operation on an input of a unit (torch 2.13, csrc/autograd/variable.cpp)."""


class InplaceWrites:
    """Refuses in-place operations that an engine's backward would not see."""

    def __init__(self, units: Mapping[str, nn.Module], order: CallOrder, *, gathers: bool) -> None:
        """Look at the first updates.

        Args:
            units: The modules whose parameters are gathered together, by name and class.
            order: The engine's position in the loop.
            gathers: Whether their parameters are gathered for each forward and backward.
        """
        self._units = units
        self._order = order
        self._gathers = gathers
        self._inside: list[tuple[str, list[tuple[Tensor, int]]]] = []
        """The units that are running, with their inputs."""
        self._outputs: list[tuple[str, Tensor, int]] = []
        """Outputs that are views or inputs."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block that runs a training forward.

        Raises:
            ModelError: An input of a unit, or an output that is a view, was changed in place.
        """
        if self._order.updates >= _FIRST:
            yield
            return
        hooks = [hook for name, unit in self._units.items() for hook in self._watch(name, unit)]
        try:
            yield
            for name, output, version in self._outputs if self._gathers else ():
                if output._version != version:
                    raise _changed_outside(name)
        except RuntimeError as error:
            if _REFUSAL not in str(error) or not (self._inside or self._outputs):
                raise
            raise (
                _changed_inside(self._inside[-1][0]) if self._inside else _changed_outside(self._outputs[-1][0])
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
            self._inside, self._outputs = [], []

    def _watch(self, name: str, unit: nn.Module) -> list[RemovableHandle]:
        """Register hooks outside the engine's."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(
                (name, [(tensor, tensor._version) for tensor in tensors_in((args, kwargs)) if tensor.requires_grad])
            )

        def after(module: nn.Module, args: Any, output: Any) -> None:
            _, inputs = self._inside.pop()
            if self._gathers and any(tensor._version != version for tensor, version in inputs):
                raise _changed_inside(name)
            given = {tensor.untyped_storage().data_ptr() for tensor, _ in inputs}
            for tensor in tensors_in(output):
                if tensor.requires_grad and (
                    getattr(tensor, "_base", None) is not None or tensor.untyped_storage().data_ptr() in given
                ):
                    self._outputs.append((name, tensor, tensor._version))

        return [
            unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            unit.register_forward_hook(after, prepend=True),
        ]


def _changed_inside(name: str) -> ModelError:
    return ModelError(
        f"unit {name} changes its input in place, as x.add_(y) does, behind the function with which the engine runs "
        "its backward; write x = x + y, or change a copy, x = x.clone()"
    )


def _changed_outside(name: str) -> ModelError:
    return ModelError(
        f"an output of unit {name} is a view or its input, and is changed in place after the unit, as y.add_(x) does, "
        "behind the function "
        "with which the engine runs the unit's backward; write y = y + x, or return y.clone() from the unit"
    )
