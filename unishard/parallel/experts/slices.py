"""Cuts the experts of a mixture, and puts a dispatch of tokens around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from unishard.distributed.slices import slice_of
from unishard.parallel.cutting import cut
from unishard.parallel.experts.dispatch import Dispatch
from unishard.parallel.experts.finding import ExpertLayer, find_experts
from unishard.parallel.groups import Groups


class ExpertSlices:
    """The experts that a rank has."""

    def __init__(self, model: nn.Module, groups: Groups, same: Groups | None = None) -> None:
        """Cut a model.

        Args:
            model: Not sharded yet.
            groups: Of this rank.
            same: The ranks that have the same tokens, if there are any.

        Raises:
            ModelError: It cannot be cut; it is as before.
        """
        self._dispatches: list[Dispatch] = []
        self._full, self._put = ExitStack(), ExitStack()
        part = groups.part()
        for experts in find_experts(model, groups.size):
            self._dispatches.append(dispatch := Dispatch(experts, groups, same))
            self._put.callback(_dispatching(dispatch, experts))
            for name in experts.parameters:
                parameter = experts.module.get_parameter(name)
                if slice_of(parameter) is None:  # not tied to another one
                    self._full.callback(cut(parameter, part))

    def count_gradients(self, *, over_holders: bool) -> None:
        """As in `SlicedModel`."""
        for dispatch in self._dispatches:
            dispatch.count_gradients(over_holders=over_holders)

    def prove(self) -> None:
        """As in `SlicedModel`: each dispatch proves its experts in the first forward."""

    def let_go(self) -> None:
        """As in `SlicedModel`."""
        self._full.pop_all()

    def close(self) -> None:
        """As in `SlicedModel`."""
        self._full.close()
        self._put.close()


def _dispatching(dispatch: Dispatch, experts: ExpertLayer) -> Callable[[], None]:
    """Put a dispatch around the forward of experts; returns what undoes it."""
    module: Any = experts.module
    own = vars(module).get("forward")
    module.num_experts, module.forward = dispatch.local, dispatch

    def undo() -> None:
        module.num_experts = experts.number
        del module.forward
        if own is not None:
            module.forward = own

    return undo
