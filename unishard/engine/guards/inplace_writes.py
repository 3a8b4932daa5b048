"""Find in-place operations on inputs of units, and on outputs that are views.

Both engines put functions of their own around a unit's inputs and outputs, to gather and reduce in backward. What is
written in place there bypasses them: torch refuses an input under FSDP2, whose backward also misses the hook of an
output that is a view, and stage 3 of ZeRO trains with a gradient without the operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.guards.guard import Guard, Looks, WatchedModule
from unishard.engine.guards.tensor_marks import memory_of, versions
from unishard.errors import ModelError

_REFUSALS = (
    "This view was created inside a custom Function",
    "is the output of a function that returns multiple views",
)
"""In torch's error for an in-place operation on an input of a unit (torch 2.13, csrc/autograd/variable.cpp)."""


class InplaceWrites(Guard):
    """Refuses in-place operations that an engine's backward would not see.

    Without it: stage 3 of ZeRO, and FSDP2 of an output that is a view, compute wrong gradients in silence; of an input
    FSDP2 ends in an error of torch about views that the model does not make.
    """

    looks = Looks.CLOSELY

    def __init__(self, *, gathers: bool) -> None:
        """Look at nothing yet.

        Args:
            gathers: Whether the parameters of units are gathered for each forward and backward.
        """
        self._gathers = gathers
        self._inside: dict[str, _Versions] = {}
        """Inputs of the units that are running, or have raised an error."""
        self._outputs: list[tuple[str, _Versions]] = []
        """Outputs of units that are views or inputs."""

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """The block that runs a forward that is looked at.

        Raises:
            ModelError: An input of a unit, or an output that is a view, was changed in place.
        """
        try:
            yield
            self._require_same_outputs()
        except RuntimeError as error:
            named = any(text in str(error) for text in _REFUSALS)
            if not named or not (self._inside or self._outputs):
                raise
            raise (
                _changed_inside([*self._inside][-1]) if self._inside else _changed_outside(self._outputs[-1][0])
            ) from error
        finally:
            self._inside, self._outputs = {}, []

    def _require_same_outputs(self) -> None:
        for name, outputs in self._outputs if self._gathers else ():
            if outputs.changed():
                raise _changed_outside(name)

    def called(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Keep the inputs of a unit."""
        if part.is_unit:
            self._inside[part.title] = _Versions(each for each in tensors_in((args, kwargs)) if each.requires_grad)

    def left(self, part: WatchedModule, output: Any) -> None:
        """Compare them, and keep its outputs that are views.

        At the end of the model before the engine looks at an output that is a view: torch 2.13 ends in SIGSEGV if its
        base was changed.
        """
        if not part.name:
            self._require_same_outputs()
        if not part.is_unit:
            return
        inputs = self._inside.pop(part.title, _Versions(()))
        if self._gathers and inputs.changed():
            raise _changed_inside(part.title)
        storages = [memory_of(tensor) for tensor in inputs.tensors]
        if outputs := [each for each in tensors_in(output) if each.requires_grad and _shares_memory(each, storages)]:
            self._outputs.append((part.title, _Versions(outputs)))


class _Versions:
    """Tensors, and how often each was written."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = [*tensors]
        self._versions = versions(self.tensors)

    def changed(self) -> bool:
        """Whether one was written since."""
        return versions(self.tensors) != self._versions


def _shares_memory(output: Tensor, storages: Sequence[torch.UntypedStorage | None]) -> bool:
    memory = memory_of(output)
    return memory is not None and (
        getattr(output, "_base", None) is not None or any(memory is each for each in storages)
    )


def _changed_inside(name: str) -> ModelError:
    return ModelError(
        f"unit {name} changes its input in place, as x.add_(y) does, behind the function with which the engine runs "
        "its backward; write x = x + y, or change a copy, x = x.clone()"
    )


def _changed_outside(name: str) -> ModelError:
    return ModelError(
        f"an output of unit {name} is a view or its input, and is changed in place after the unit, as y.add_(x) does, "
        "behind the function with which the engine runs the unit's backward; write y = y + x, or return y.clone() from "
        "the unit"
    )
