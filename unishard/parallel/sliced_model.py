"""Cuts a model, so that each rank has a part of it, and makes it whole again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from torch import nn

from unishard.config import Parallel
from unishard.parallel.experts import ExpertSlices
from unishard.parallel.groups import Groups, make_groups
from unishard.parallel.tensor import TensorSlices


class _Slices(Protocol):
    """One way in which ranks have different parts."""

    def count_gradients(self, *, over_holders: bool) -> None: ...

    def let_go(self) -> None: ...

    def prove(self) -> None: ...

    def close(self) -> None: ...


class SlicedModel:
    """What a rank has of a model, until it is closed."""

    def __init__(self, model: nn.Module, section: Parallel, groups_of: Callable[[int], Groups] = make_groups) -> None:
        """Cut a model that is not prepared yet; without an effect where the section asks for nothing. Collective.

        Args:
            model: Whole on rank 0, whose values all ranks get when it is sharded.
            section: What ranks do together.
            groups_of: Makes groups of a size; those of a plan are not collective.

        Raises:
            ModelError: It cannot be cut; it is as before.
        """
        self._slices: list[_Slices] = []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            layers = groups_of(section.tensor.size) if section.tensor.on else None
            if section.expert.on:
                self._slices.append(ExpertSlices(model, groups_of(section.expert.size), layers))
            if layers is not None:
                self._slices.append(TensorSlices(model, section.tensor.plan, layers))
            on_error.pop_all()

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange tensors in a forward, whatever the engine gathers."""
        return bool(self._slices)

    def count_gradients(self, *, over_holders: bool) -> None:
        """Multiply gradients so that what the engine makes of them is the mean over all ranks.

        Args:
            over_holders: Whether it averages those of slices over their holders; if not, it divides their sum by all
                ranks.
        """
        for slices in self._slices:
            slices.count_gradients(over_holders=over_holders)

    def prove(self) -> None:
        """Check, once it was called, that the model computes what it computed before it was cut. Collective.

        Raises:
            ModelError: It does not; names the part.
        """
        for slices in self._slices:
            slices.prove()

    def let_go(self) -> None:
        """Keep no full tensors any more: the engine is about to shard what is left."""
        for slices in self._slices:
            slices.let_go()

    def close(self) -> None:
        """Leave the modules as they were, and the tensors that were not let go."""
        while self._slices:
            self._slices.pop().close()
