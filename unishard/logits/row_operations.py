"""What models do to logits that can be done to some rows of them at a time: nothing that looks at another token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

ELEMENTWISE = frozenset(
    (
        "add", "bfloat16", "clamp", "clip", "clone", "detach", "div", "double", "float", "half", "mul", "multiply",
        "neg", "sub", "tanh", "to", "true_divide", "type", "__rdiv__", "__rsub__", "__rtruediv__",
    )
)  # fmt: skip
"""By their names in torch; with `_` behind them they change the logits in place."""
RESHAPING = frozenset(("contiguous", "flatten", "reshape", "squeeze", "unsqueeze", "view"))
"""Those that leave a row whole, if the last dimension stays."""

Operation = Callable[[Tensor], Tensor]


def elementwise(function: Callable[..., Any], logits: Tensor, args: Sequence[Any], kwargs: Any) -> Operation | None:
    """What an operation on logits does to rows `[tokens, vocabulary]`; None if it is not the same for each.

    Args:
        function: One of `ELEMENTWISE`.
        logits: What stands for them among the arguments.
        args: Of the function.
        kwargs: Likewise.
    """
    operands = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not logits]
    if any(each.numel() != max(each.shape[-1:], default=1) for each in operands):
        return None

    def of_rows(rows: Tensor) -> Tensor:
        def own(argument: Any) -> Any:
            if argument is logits:
                return rows
            return argument.flatten() if isinstance(argument, Tensor) and argument.dim() else argument

        result: Tensor = function(*map(own, args), **{name: own(each) for name, each in kwargs.items()})
        return result

    return of_rows


def assigned(index: Any, value: Any, dims: int) -> Operation | None:
    """What `logits[index] = value` does to rows; None if it is not the same for each."""
    at = _of_last(index, dims)
    if at is None or (isinstance(value, Tensor) and value.numel() != 1):
        return None

    def change(rows: Tensor) -> Tensor:
        rows = rows.clone()
        rows[:, at] = value
        return rows

    return change


def taken(index: Any, dims: int) -> Operation | None:
    """What `logits[index]` takes of each row; None if it takes some rows, or not a span of each."""
    at = _of_last(index, dims)
    return (lambda rows: rows[:, at]) if isinstance(at, slice) else None


def of_leading(index: Any, dims: int) -> bool:
    """Whether an index takes whole rows."""
    parts = _expanded(index, dims)
    return parts is not None and (len(parts) < dims or _is_all(parts[-1]))


def _of_last(index: Any, dims: int) -> Any:
    """What an index of all rows takes of each; None if it is not one."""
    parts = _expanded(index, dims)
    if parts is None or len(parts) < dims or not all(map(_is_all, parts[:-1])):
        return None
    return parts[-1]


def _expanded(index: Any, dims: int) -> list[Any] | None:
    """One index for each dimension, up to the last that is indexed; a mask is as many as it has dimensions.

    None if there are dimensions that the index adds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(each is None for each in parts):
        return None
    spans = [each.dim() if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in parts]
    indexed = sum(span for each, span in zip(parts, spans, strict=True) if not isinstance(each, EllipsisType))
    result: list[Any] = []
    for part, span in zip(parts, spans, strict=True):
        result += [slice(None)] * (dims - indexed) if isinstance(part, EllipsisType) else [part] * span
    return result


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)
