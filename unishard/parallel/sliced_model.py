"""Cuts a model, so that each rank has a part of it, and makes it whole again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from unishard.config import Parallel
from unishard.contract.kit.tracebacks import modules_in
from unishard.errors import ModelError
from unishard.failures.endings import may_be_the_models
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
        self._model, self._field = model, section.slices
        self._slices: list[_Slices] = []
        self._first: RemovableHandle | None = None
        """Until the first forward has ended."""
        with ExitStack() as on_error:
            on_error.callback(self.close)
            layers = groups_of(section.tensor.size) if section.tensor.on else None
            if section.expert.on:
                self._slices.append(ExpertSlices(model, groups_of(section.expert.size), layers))
            if layers is not None:
                self._slices.append(TensorSlices(model, section.tensor.plan, layers))
            on_error.pop_all()
        if self._slices:
            self._first = model.register_forward_hook(lambda *_: self._end_first())

    def _end_first(self) -> None:
        if self._first is not None:
            self._first.remove()
            self._first = None

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

    def refuse_failure(self, error: Exception) -> None:
        """Raise ModelError in place of an error of the first forward, in which the model has parts of its weights."""
        if self._first is None or not may_be_the_models(error):
            return
        text = f"{type(error).__name__}: {error}".rstrip(".")
        at = next(modules_in(error.__traceback__, self._model), None)
        where = f", in {at[0] or 'the model'} ({type(at[1]).__name__})" if at else ""
        raise ModelError(
            f"the model fails where each rank has a part of its weights: {text}{where}; if it runs without "
            f"{self._field}, leave what this computes with out of the plan, or leave the section out"
        ) from error

    def let_go(self) -> None:
        """Keep no full tensors any more: the engine is about to shard what is left."""
        for slices in self._slices:
            slices.let_go()

    def close(self) -> None:
        """Leave the modules as they were, and the tensors that were not let go."""
        self._end_first()
        while self._slices:
            self._slices.pop().close()
