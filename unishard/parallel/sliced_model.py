"""Cuts a model, so that each rank has a part of it, and makes it whole again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from unishard.config import Parallel
from unishard.distributed.slices import Slice, slice_of
from unishard.parallel.cutting import cut
from unishard.parallel.dispatch import Dispatch
from unishard.parallel.finding import ExpertLayer, find_experts
from unishard.parallel.groups import Groups, make_groups


class SlicedModel:
    """What a rank has of a model, until it is closed."""

    def __init__(self, model: nn.Module, section: Parallel, groups: Groups | None = None) -> None:
        """Cut a model that is not prepared yet; without an effect where the section asks for nothing. Collective.

        Args:
            model: Whole on rank 0, whose values all ranks get when it is sharded.
            section: What ranks do together.
            groups: In place of new ones: those of a plan. Not collective then.

        Raises:
            ModelError: It cannot be cut; it is as before.
        """
        self._dispatches: list[Dispatch] = []
        self._full, self._put = ExitStack(), ExitStack()
        if not section.expert.on:
            return
        found = find_experts(model, section.expert.size)
        groups = groups or make_groups(section.expert.size)
        part = Slice(groups.number, groups.size, groups.holders, groups.peers)
        for experts in found:
            self._dispatches.append(dispatch := Dispatch(experts, groups))
            self._put.callback(_dispatching(dispatch, experts))
            for name in experts.parameters:
                parameter = experts.module.get_parameter(name)
                if slice_of(parameter) is None:  # not tied to another one
                    self._full.callback(cut(parameter, part))

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange tensors in a forward, whatever the engine gathers."""
        return bool(self._dispatches)

    def count_gradients(self, *, over_holders: bool) -> None:
        """Multiply the gradients of slices so that what the engine makes of them is the mean over all ranks.

        Args:
            over_holders: Whether it averages them over their holders; if not, it divides their sum by all ranks.
        """
        for dispatch in self._dispatches:
            dispatch.factor = 1 / dispatch.groups.size if over_holders else 1.0

    def let_go(self) -> None:
        """Keep no full tensors any more: the engine is about to shard what is left."""
        self._full.pop_all()

    def close(self) -> None:
        """Leave the modules as they were, and the tensors that were not let go."""
        self._full.close()
        self._put.close()
        self._dispatches.clear()


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
