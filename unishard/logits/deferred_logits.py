"""What stands in the place of logits until the model computes their cross entropy, and behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from unishard.distributed.nested_tensors import tensors_in
from unishard.errors import ContractError, ModelError
from unishard.logits.chunks import in_chunks
from unishard.logits.row_operations import (
    ELEMENTWISE,
    RESHAPING,
    Operation,
    assigned,
    elementwise,
    of_leading,
    taken,
)

_PAST_DISPATCH = ("__array__", "__bool__", "__deepcopy__", "__reduce_ex__", "item", "numpy", "tolist")
"""What torch refuses in words of its own."""


@dataclass
class HeadCalls:
    """The calls of a model's heads in one forward."""

    model: str
    """Its class."""
    chunk_tokens: int
    running: bool = True
    """Whether the forward has not ended."""
    losses: int = 0
    """How many losses were computed."""


@dataclass(frozen=True)
class Recipe:
    """How logits are made."""

    calls: HeadCalls
    head: nn.Module
    hidden: Tensor
    """`[..., width]`, what the head was called with."""
    operations: tuple[Operation, ...] = ()
    """What the model has done to the logits since, on `[tokens, vocabulary]`."""

    def done_to(self, logits: Tensor) -> Tensor:
        """What the model makes of logits of the head."""
        for operation in self.operations:
            logits = operation(logits)
        return logits

    def then(self, operation: Operation) -> Recipe:
        """With one more operation."""
        return replace(self, operations=(*self.operations, operation))


class DeferredLogits(Tensor):
    """Logits that are not made: their shape and dtype, and how to make those of some tokens.

    An operation that does the same to each token is kept for later, and cross entropy is computed in chunks. What a
    tensor says of itself can be read. Everything else is an error that names it.
    """

    recipe: Recipe

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int, dtype: torch.dtype) -> Self:
        """The logits, `[..., vocabulary]`, of hidden states."""
        shape = (*recipe.hidden.shape[:-1], vocabulary)
        logits: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=recipe.hidden.device)
        logits.recipe = recipe
        return logits

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={[*self.shape]}, not made because of training.loss_chunk_tokens)"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep an operation, compute the loss, or let the tensor say of itself what it can."""
        logits, named = _first(args, kwargs), kwargs or {}
        if func.__name__ in _PAST_DISPATCH:
            logits._refuse(func.__name__)
        if func.__name__ == "detach" and not torch.is_grad_enabled():  # of DeepSpeed, around what a module returns
            return logits._with(logits.recipe.hidden)
        with torch._C.DisableTorchFunctionSubclass():
            change = logits._changes.get(func.__name__) if logits.recipe.calls.running else None
            return func(*args, **named) if change is None else change(logits, func, args, named)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what would compute with logits that are not there."""
        _first(args, kwargs)._refuse(func.overloadpacket.__name__.strip("_"))

    def _keep(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> DeferredLogits:
        return self._then(func.__name__, elementwise(func, self, args, kwargs))

    def _keep_in_place(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Self:
        self.recipe = self._then(func.__name__, elementwise(func, self, args, kwargs)).recipe
        return self

    def _assign(self, func: Callable[..., Any], args: Sequence[Any], kwargs: object) -> None:
        self.recipe = self._then(func.__name__, assigned(args[1], args[2], self.dim())).recipe

    def _take(self, func: Callable[..., Any], args: Sequence[Any], kwargs: object) -> DeferredLogits:
        index = args[1]
        if of_leading(index, self.dim()):
            return self._with(self.recipe.hidden[index])
        return self._then(func.__name__, taken(index, self.dim()))

    def _reshape(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> DeferredLogits:
        shape = func(torch.empty(self.shape, device="meta"), *args[1:], **kwargs).shape
        if shape[-1:] != self.shape[-1:]:
            self._refuse(func.__name__)
        return self._with(self.recipe.hidden.reshape(*shape[:-1], -1))

    def _cross_entropy(self, func: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        return self._loss(*args[1:], **kwargs)

    def _loss(
        self,
        target: Tensor,
        weight: None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Cross entropy, with the arguments of torch's."""
        if (self.dim(), target.dim()) != (2, 1) or not weight is size_average is reduce is None:
            self._refuse("cross_entropy with weights, or in another shape than [tokens, vocabulary],")
        if len(self) != len(target):  # in torch's words
            raise ValueError(f"Expected input batch_size ({len(self)}) to match target batch_size ({len(target)}).")
        recipe, unreduced = self.recipe, reduction == "none"

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            rows = recipe.done_to(logits)
            return functional.cross_entropy(
                rows.to(torch.promote_types(rows.dtype, torch.float32)),
                labels,
                ignore_index=ignore_index,
                reduction="none" if unreduced else "sum",
                label_smoothing=label_smoothing,
            )

        combine = torch.cat if unreduced else _sum
        result = in_chunks(recipe.head, recipe.hidden, target, loss, combine, recipe.calls.chunk_tokens)
        recipe.calls.losses += 1
        return result / (target != ignore_index).sum() if reduction == "mean" else result

    def _then(self, name: str, operation: Operation | None) -> DeferredLogits:
        if operation is None:
            self._refuse(name)
        none = operation(torch.empty(0, self.shape[-1], dtype=self.dtype, device=self.device))  # says shape and dtype
        return self.of(self.recipe.then(operation), none.shape[-1], none.dtype)

    def _with(self, hidden: Tensor) -> DeferredLogits:
        return self.of(replace(self.recipe, hidden=hidden), self.shape[-1], self.dtype)

    def _refuse(self, name: str) -> NoReturn:
        calls = self.recipe.calls
        if not calls.running:
            raise ContractError(
                f"{name.strip('_')} of logits that were not made, because of training.loss_chunk_tokens; call the "
                "model without labels where you need them: engine(input_ids=...).logits"
            )
        raise ModelError(
            f"{calls.model} calls {name.strip('_')} on its logits, which needs those of all tokens at once; leave "
            "training.loss_chunk_tokens out"
        )

    _changes: ClassVar[Mapping[str, Callable[..., Any]]] = {
        **dict.fromkeys(ELEMENTWISE, _keep),
        **dict.fromkeys(map("{}_".format, ELEMENTWISE), _keep_in_place),
        **dict.fromkeys(RESHAPING, _reshape),
        "__getitem__": _take,
        "__setitem__": _assign,
        "cross_entropy": _cross_entropy,
    }
    """What is done in the forward, by the names of torch's functions."""


def _first(args: Sequence[Any], kwargs: dict[str, Any] | None) -> DeferredLogits:
    return next(each for each in tensors_in((args, kwargs)) if isinstance(each, DeferredLogits))


def _sum(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()
