"""How the arguments of a function by heads are laid out: which dimensions are heads, and which are positions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unishard.errors import ContractError, ModelError

Dimensions = tuple[str, ...]
"""A letter for each dimension: `b` samples, `l` positions, `h` heads, `g` groups of heads; others are only sizes."""
_ARGUMENT = re.compile(r"\s*(\w+)\s*:\s*([a-z](?:\s+[a-z])*)\s*")
_RESULT = re.compile(r"\s*([a-z](?:\s+[a-z])*)\s*")


class DeclaredFunction:
    """A function that computes each head by itself, and how its tensors are laid out."""

    def __init__(self, function: Callable[..., Any], layout: str) -> None:
        """Read a layout.

        Args:
            function: Returns a tensor, or a tuple that begins with it.
            layout: As of `unishard.by_heads`.

        Raises:
            ContractError: It cannot be read, or does not fit the function.
        """
        self.name = str(getattr(function, "__name__", function))
        self._function = function
        self._order = list(inspect.signature(function).parameters)
        self.arguments, self.result = _parsed(layout, self._order, self.name)

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call that the layout names."""
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        return {name: given[name] for name in self.arguments if isinstance(given.get(name), Tensor)}

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """What the function makes of a call with other tensors, each where it was passed."""
        placed = [tensors.get(name, value) for name, value in zip(self._order, args, strict=False)]
        return self._function(*placed, *args[len(placed) :], **{n: tensors.get(n, v) for n, v in kwargs.items()})

    def sizes(self, tensors: Mapping[str, Tensor], length: int) -> dict[str, int]:
        """The size of each letter.

        Args:
            tensors: Of a call.
            length: Of the positions that they must have.

        Raises:
            ModelError: They are laid out in another way.
        """
        found: dict[str, int] = {"l": length}
        for name, tensor in tensors.items():
            self.require(name, tensor, self.arguments[name], found)
        if "h" not in found:
            raise ModelError(f"{self.name}, declared by unishard.by_heads, was called without a tensor that has heads")
        return found

    def require(self, name: str, tensor: Tensor, dimensions: Dimensions, sizes: dict[str, int]) -> None:
        """Raise ModelError where a tensor has other dimensions, or other sizes than those of a letter before."""
        fits = tensor.dim() == len(dimensions) and all(
            sizes.setdefault(letter, size) == size for letter, size in zip(dimensions, tensor.shape, strict=True)
        )
        if not fits:
            known = ", ".join(f"{letter} = {sizes[letter]}" for letter in dimensions if letter in sizes)
            raise ModelError(
                f"{self.name}, declared by unishard.by_heads: {name} is {[*tensor.shape]}, and not "
                f"{' '.join(dimensions)} (here {known}); a letter stands for one size in the whole declaration, and l "
                "for the positions of this rank"
            )


def output_of(made: Any) -> Tensor:
    """The tensor that a function returns, first of what it returns."""
    output: Tensor = made[0] if isinstance(made, tuple) else made
    return output


def with_output(made: Any, output: Tensor) -> Any:
    """What a function returned, with another tensor, and as many things beside it as before."""
    return (output, *made[1:]) if isinstance(made, tuple) else output


def head_dimension(dimensions: Dimensions) -> int | None:
    """That of the heads, or of groups of them."""
    return next((place for place, letter in enumerate(dimensions) if letter in ("h", "g")), None)


def as_heads(tensor: Tensor, dimensions: Dimensions) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A tensor as `[batch, heads, positions, rest]`, and what undoes it; what has no heads has one."""
    headless = head_dimension(dimensions) is None
    if headless:
        tensor, dimensions = tensor.unsqueeze(-1), (*dimensions, "g")
    heads = head_dimension(dimensions)
    order = [dimensions.index("b"), heads or 0, dimensions.index("l")]
    order += [place for place in range(tensor.dim()) if place not in order]
    inverse = [order.index(place) for place in range(tensor.dim())]
    rest = tensor.permute(order).shape[3:]

    def restore(moved: Tensor) -> Tensor:
        back = torch.unflatten(moved, 3, rest) if rest else moved.squeeze(3)
        back = back.permute(inverse)
        return back.squeeze(-1) if headless else back

    moved = tensor.permute(order)
    return (moved.flatten(3) if rest else moved.unsqueeze(3)), restore


def _parsed(layout: str, parameters: list[str], function: str) -> tuple[dict[str, Dimensions], Dimensions]:
    given, arrow, returned = layout.partition("->")
    matches = [_ARGUMENT.fullmatch(each) for each in given.split(",")]
    result = _RESULT.fullmatch(returned)
    if not arrow or result is None or not all(matches):
        raise _unreadable(function, layout, "write name: letters for each tensor, and those of the result")
    arguments = {match[1]: tuple(match[2].split()) for match in matches if match is not None}
    unknown = [name for name in arguments if name not in parameters]
    if unknown:
        raise _unreadable(function, layout, f"{unknown[0]} is no parameter of it ({', '.join(parameters)})")
    of_result = tuple(result[1].split())
    if not {"b", "l", "h"} <= {*of_result}:
        raise _unreadable(function, layout, "the result needs b (samples), l (positions) and h (heads)")
    for name, letters in {**arguments, "the result": of_result}.items():
        if len({*letters}) < len(letters) or {"h", "g"} <= {*letters} or ("l" in letters and "b" not in letters):
            raise _unreadable(
                function, layout, f"{name} may have a letter once, h or g and not both, and needs b where it has l"
            )
    if not any({"h", "l"} <= {*letters} for letters in arguments.values()):
        raise _unreadable(function, layout, "one tensor needs l (positions) and h (heads)")
    return arguments, of_result


def _unreadable(function: str, layout: str, problem: str) -> ContractError:
    return ContractError(
        f"unishard.by_heads of {function} cannot be read: {layout!r}: {problem}; an example is "
        "'x: b l h d, decay: b l h, A: h -> b l h d'"
    )
