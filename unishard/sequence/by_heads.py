"""Functions that compute each head by itself, over sequences of which each rank of a group has a part.

By all-to-all each rank gets all positions of some heads, and gives back all heads of its positions. That is exact for
every such function, whatever it computes: recurrences that are not linear, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from unishard.errors import ModelError
from unishard.sequence import context
from unishard.sequence.context import SplitBatch
from unishard.sequence.documents import Documents, alike
from unishard.sequence.exchange import heads_for_positions, positions_for_heads, repeats_to_divide
from unishard.sequence.head_layout import (
    DeclaredFunction,
    Dimensions,
    as_heads,
    head_dimension,
    output_of,
    with_output,
)
from unishard.sequence.same_positions import OTHER_SHAPES, same

Function = TypeVar("Function", bound=Callable[..., Any])
_FEW = 16
"""Positions that show whether heads are computed by themselves."""


def by_heads(layout: str) -> Callable[[Function], Function]:
    """Declare that a function of your model computes each head, or channel, by itself, over all positions.

    Under `parallel.sequence` it then gets whole sequences of some heads on each rank; a proof checks that no head
    depends on another. Packed documents are apart, as in `unishard.attention`. Without an engine that splits sequences
    it is the function. Collective in the ranks that share a sample::

        @unishard.by_heads("x: b l h d, decay: b l h, A: h -> b l h d")
        def recurrence(x, decay, A): ...

    Args:
        layout: The dimensions of each tensor by its name, and of the result: `b` samples, `l` positions, `h` heads,
            `g` groups of heads, each shared by as many heads; other letters are sizes. A tensor without `l` is a
            parameter, of which the function gets its heads; one without `h` and `g` belongs to all heads.

    Returns:
        A decorator. The function returns a tensor, or a tuple that begins with it.

    Raises:
        ContractError: The layout cannot be read.
    """

    def decorate(function: Function) -> Function:
        declared = DeclaredFunction(function, layout)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            split = context.current
            if split is None:
                return function(*args, **kwargs)
            return _outside_graphs(declared, split, args, kwargs)

        return run  # type: ignore[return-value]

    return decorate


def _declared_call(declared: DeclaredFunction, split: SplitBatch, args: tuple[Any, ...], kwargs: Any) -> Any:
    if split.proving:
        return stand_in(declared, split, args, kwargs)
    return over_heads(declared, split, args, kwargs, split.separate_documents)


# Not compiled, as attention is not.
_outside_graphs = torch.compiler.disable(_declared_call)  # type: ignore[no-untyped-call]


def over_heads(
    declared: DeclaredFunction,
    split: SplitBatch,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    documents: Sequence[Documents],
) -> Any:
    """What a function makes of whole sequences, at this rank's positions. Collective in the group.

    Args:
        declared: The function.
        split: The micro-batch.
        args: Of the call, with this rank's positions.
        kwargs: Likewise.
        documents: Which are computed apart, of each sample.

    Raises:
        ModelError: The heads do not divide, or tensors are laid out in another way.
    """
    tensors, group = declared.tensors(args, kwargs), split.group
    heads = declared.sizes(tensors, split.part)["h"]
    if heads % group.size:
        raise ModelError(
            f"{declared.name} has {heads} heads, which do not divide by the {group.size} ranks that share a sample; "
            "set parallel.sequence.size to a divisor of the heads"
        )
    whole = {name: _of_my_heads(tensor, declared.arguments[name], heads, split) for name, tensor in tensors.items()}
    made = _by_documents(declared, args, kwargs, whole, documents)
    moved, restore = as_heads(output_of(made), declared.result)
    mine = restore(positions_for_heads(split.layout.split(moved, 2), group))
    return with_output(made, mine.contiguous())  # models call view


def _of_my_heads(tensor: Tensor, dimensions: Dimensions, heads: int, split: SplitBatch) -> Tensor:
    """A tensor with all positions, of this rank's heads."""
    if "l" not in dimensions:
        return _share(tensor, dimensions, heads, split)
    moved, restore = as_heads(tensor, dimensions)
    moved = _divisible(moved, 1, heads, split)
    return restore(split.layout.join(heads_for_positions(moved, split.group), 2))


def _share(tensor: Tensor, dimensions: Dimensions, heads: int, split: SplitBatch) -> Tensor:
    """A tensor of this rank's heads."""
    place = head_dimension(dimensions)
    if place is None:
        return tensor
    return _divisible(tensor, place, heads, split).chunk(split.group.size, place)[split.group.rank]


def _divisible(tensor: Tensor, place: int, heads: int, split: SplitBatch) -> Tensor:
    repeats = repeats_to_divide(tensor.shape[place], heads, split.group.size)
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, place)


def _by_documents(
    declared: DeclaredFunction,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    whole: Mapping[str, Tensor],
    documents: Sequence[Documents],
) -> Any:
    """What a function makes of each document; of samples with the same ones together."""
    made, outputs = None, []
    for rows, spans in alike(documents):
        parts = []
        for start, end in spans:
            cut = {name: _cut(tensor, declared.arguments[name], rows, start, end) for name, tensor in whole.items()}
            made = declared.call(args, kwargs, cut)
            parts.append(output_of(made))
        outputs.append(torch.cat(parts, declared.result.index("l")))
    return with_output(made, torch.cat(outputs, declared.result.index("b")))


def _cut(tensor: Tensor, dimensions: Dimensions, rows: slice, start: int, end: int) -> Tensor:
    if "l" not in dimensions:
        return tensor
    of_rows = tensor.narrow(dimensions.index("b"), rows.start, rows.stop - rows.start)
    return of_rows.narrow(dimensions.index("l"), start, end - start)


def stand_in(declared: DeclaredFunction, split: SplitBatch, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Something of each position's own arguments, in the place of what a function makes, for a proof.

    It also finds out whether the function computes each head by itself, and notes where it does not.
    """
    tensors = declared.tensors(args, kwargs)
    length = next(t.shape[declared.arguments[n].index("l")] for n, t in tensors.items() if "l" in declared.arguments[n])
    sizes = declared.sizes(tensors, length)
    few = {
        name: _cut(t, declared.arguments[name], slice(0, sizes["b"]), 0, min(_FEW, length))
        for name, t in tensors.items()
    }
    made = declared.call(args, kwargs, few)
    output = output_of(made)
    declared.require("the result", output, declared.result, {**sizes, "l": min(_FEW, length)})
    if not _independent(declared, split, args, kwargs, few, output, sizes["h"]):
        split.mixed_heads.add(declared.name)
    total = output.new_zeros(
        [length if letter == "l" else n for letter, n in zip(declared.result, output.shape, strict=True)]
    )
    for name, tensor in tensors.items():
        if "l" in declared.arguments[name]:
            total = total + _laid_out(tensor, declared.arguments[name], declared.result).to(total.dtype)
    return with_output(made, total)


def _independent(
    declared: DeclaredFunction,
    split: SplitBatch,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    few: Mapping[str, Tensor],
    output: Tensor,
    heads: int,
) -> bool:
    """Whether this rank's heads are the same without the others; also where the function draws random numbers."""
    if heads % split.group.size:
        return True  # refused where it runs
    if not torch.equal(output_of(declared.call(args, kwargs, few)), output):
        return True
    mine = {name: _share(tensor, declared.arguments[name], heads, split) for name, tensor in few.items()}
    wanted = output.chunk(split.group.size, declared.result.index("h"))[split.group.rank]
    return same(output_of(declared.call(args, kwargs, mine)), wanted, OTHER_SHAPES)


def _laid_out(tensor: Tensor, dimensions: Dimensions, result: Dimensions) -> Tensor:
    """A tensor as the result is laid out: the mean over what it does not have."""
    others = [place for place, letter in enumerate(dimensions) if letter not in result]
    kept = [letter for letter in dimensions if letter in result]
    mean = tensor.float().mean(others) if others else tensor
    mean = mean.permute([kept.index(letter) for letter in result if letter in kept])
    for place, letter in enumerate(result):
        mean = mean if letter in kept else mean.unsqueeze(place)
    return mean
