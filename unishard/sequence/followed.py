"""Finds the module that mixes positions: the first that makes another thing of the same.

Forwards over the positions of all parts follow the one over this rank's only. What each module puts out of these
positions is compared, and where it is only rounded in another way it is set to what it was. So the next module takes
the same bits; nothing that was rounded adds up or sends a token to other experts, and what differs is proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.sequence.same_positions import OF_ROWS, OTHER_SHAPES, SAME_SHAPES, PartOfAll, dimension, own, rows, same

Key = tuple[str, int]
"""The name of a module, and which of its calls."""


class Mixing(NamedTuple):
    """A module that mixes positions."""

    name: str
    counts: bool
    """Whether other tokens elsewhere change nothing: it only counts positions."""


def first_mixing(
    model: nn.Module, runs: Sequence[Callable[[], Any]], share: PartOfAll, *, only_other: bool
) -> Mixing | None:
    """The first module that mixes positions of this rank; None if none does.

    Args:
        model: The model.
        runs: Its forwards over the positions of this rank, over those of all, with other tokens in the parts of the
            others, and with each part where the next one was.
        share: What this rank has.
        only_other: Whether only what other tokens change is looked at.
    """
    part, whole, other, moved = runs
    forwards = _Followed(model, share, part)
    different = forwards.follow(whole, share.rank)
    disturbed = forwards.follow(other, share.rank)
    counting = set() if only_other else forwards.follow(moved, share.next_rank)
    wrong = disturbed if only_other else different | disturbed | counting
    key = next((key for key in forwards.parts if key in wrong), None)
    return None if key is None else Mixing(key[0], key in counting - disturbed)


class _Pair(NamedTuple):
    """A tensor of this rank's positions, in host memory, in two forwards."""

    here: Tensor
    before: Tensor
    placed: bool
    """Whether it has positions."""


class _Call(NamedTuple):
    """What a module took and put out."""

    inputs: list[Tensor]
    output: list[Tensor]


class _Followed:
    """Forwards over the same positions."""

    def __init__(self, model: nn.Module, share: PartOfAll, part: Callable[[], Any]) -> None:
        self._model, self._share = model, share
        self.parts: dict[Key, _Call] = {}
        """Of the forward over only this rank's positions, in the order in which modules end."""
        self._wholes: dict[Key, _Call] = {}
        """Of the first one over all: what was made of this rank's."""
        self._rounded: set[Key] = set()
        """Those that made the same of them, but for what is rounded."""
        with at_ends(model, self._keep):
            part()
        dtypes = (each.dtype for call in self.parts.values() for each in call.output if each.is_floating_point())
        self._low = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)

    def follow(self, run: Callable[[], Any], place: int) -> set[Key]:
        """The calls of modules that make another thing of the same inputs: first than of the part only, then of all.

        Args:
            run: Runs the positions of all ranks.
            place: Where those of this rank are.
        """
        found: set[Key] = set()
        first = not self._wholes

        def at_end(key: Key, taken: Any, made: Any) -> Any:
            part_only, before = self.parts.get(key), self._wholes.get(key)
            if part_only is None or (before is None and not first):
                return None
            inputs = self._pairs(taken, part_only.inputs, before and before.inputs, place)
            output = self._pairs(made, part_only.output, before and before.output, place)
            if first:
                self._wholes[key] = _Call([each.here for each in inputs], [each.here for each in output])
            if not all(self._same(each, first) for each in output if _counts(key, each, first)):
                taken_alike = (self._same(each, first) for each in inputs if each.here.shape == each.before.shape)
                if not key[0] or all(taken_alike):  # the model itself gets how many labels there are too
                    found.add(key)
                return None
            if first:
                self._rounded.add(key)
            return self._set(made, part_only.output, place) if key in self._rounded else None

        with at_ends(self._model, at_end):
            run()
        return found

    def _keep(self, key: Key, taken: Any, made: Any) -> None:
        self.parts[key] = _Call(*([each.to("cpu", copy=True) for each in tensors_in(value)] for value in (taken, made)))

    def _pairs(self, value: Any, part_only: list[Tensor], before: list[Tensor] | None, place: int) -> list[_Pair]:
        pairs = []
        for number, (tensor, part) in enumerate(zip(tensors_in(value), part_only, strict=False)):
            here, there = own(tensor, part, self._share, place)
            there = there if before is None else before[number]
            pairs.append(_Pair(here.to("cpu", copy=True), there, self._dim(tensor, part) is not None))
        return pairs

    def _dim(self, tensor: Tensor, part: Tensor) -> int | None:
        """The dimension of the positions; None for a list of numbers, which may be sorted, as tokens by experts."""
        return dimension(tensor, part, self._share) if tensor.dim() >= OF_ROWS else None

    def _same(self, pair: _Pair, first: bool) -> bool:
        return same(pair.here, pair.before, OTHER_SHAPES if first else SAME_SHAPES, self._low)

    def _set(self, made: Any, part_only: list[Tensor], place: int) -> Any:
        """What a module made, with what it made of only this rank's positions."""
        parts = iter(part_only)

        def changed(tensor: Tensor) -> Tensor:
            part = next(parts, None)
            dim = None if part is None else self._dim(tensor, part)
            if part is None or dim is None:
                return tensor
            new = tensor.clone(memory_format=torch.contiguous_format)
            rows(new, dim, self._share, place).copy_(rows(part, dim, self._share._replace(size=1), 0))
            return new

        return replace_tensors(made, changed)


def _counts(key: Key, pair: _Pair, first: bool) -> bool:
    """Whether an output says anything: of a module in the model if it has positions, else what it is for is unknown, as
    of the tokens of an expert, which are as many as all parts have by chance.
    """
    if key[0]:
        return pair.placed and pair.here.shape == pair.before.shape
    return pair.placed or first or pair.here.dim() >= OF_ROWS


@contextmanager
def at_ends(model: nn.Module, of_call: Callable[[Key, Any, Any], Any]) -> Iterator[None]:
    """A block in which a function gets what each module takes and puts out, and returns what is to be put out."""
    calls = Counter[str]()

    def named(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            calls[name] += 1
            return of_call((name, calls[name]), (args, kwargs), output)

        return hook

    hooks = [module.register_forward_hook(named(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
