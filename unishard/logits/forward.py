"""Around the forward of a model of transformers, or of one that contains one, with labels."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.errors import ModelError
from unishard.logits.deferred_logits import DeferredLogits, HeadCalls, Recipe

_FIELD = "training.loss_chunk_tokens"
_paused = False


@contextmanager
def whole_logits() -> Iterator[None]:
    """A block in which models make their logits."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


class _Place:
    """Where a model looks its head up."""

    def __init__(self, model: nn.Module, parent: str, name: str, head: nn.Module) -> None:
        self.parent, self.name, self.head = model.get_submodule(parent), name, head
        self.vocabulary: int = getattr(head, "out_features", None) or _rows(head)
        self.title = f"{parent}.{name}" if parent else name

    def fill(self, calls: HeadCalls) -> None:
        """Let the model find a stand-in. An attribute of an instance comes before its modules, where the head stays."""
        vars(self.parent)[self.name] = _StandIn(self, calls)

    def clear(self) -> None:
        """Let it find its head again."""
        vars(self.parent).pop(self.name, None)


class _StandIn(nn.Module):
    """Stands in the place of a head, with its parameters and what else is read of it."""

    def __init__(self, place: _Place, calls: HeadCalls) -> None:
        super().__init__()
        vars(self).update(vars(place.head))
        self._place, self._calls = place, calls

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        recipe = Recipe(self._calls, self._place.head, hidden)
        return DeferredLogits.of(recipe, self._place.vocabulary, hidden.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_place"].head, name)


class ChunkedForward:
    """Lets a model that is called with labels compute its loss in chunks."""

    def __init__(self, model: nn.Module, chunk_tokens: int) -> None:
        """Watch the forward of a model that is not sharded yet.

        Raises:
            BackendError: This torch lacks a private name that it needs.
            ModelError: It has no head that `get_output_embeddings` names, or hooks look at what its head returns.
        """
        CORE_PRIVATE_API["logits-in-chunks"].require()
        self._chunk_tokens, self._name = chunk_tokens, type(model).__name__
        owners = {module: head for module in model.modules() if (head := _head_of(module)) is not None}
        heads = set(owners.values())
        self._places = [
            _Place(model, *_split(name), module)
            for name, module in model.named_modules(remove_duplicate=False)
            if module in heads and name
        ]
        if not self._places:
            raise ModelError(
                f"{_FIELD}: {self._name} has no head that get_output_embeddings names; call unishard.chunked_loss in "
                f"the forward of your model, and leave {_FIELD} out"
            )
        self._hooks: list[RemovableHandle] = []
        for place in self._places:
            if place.head._forward_hooks:
                raise ModelError(
                    f"{_FIELD}: {place.title} has forward hooks, which would see no logits; remove them, or leave "
                    f"{_FIELD} out"
                )
        self._calls: HeadCalls | None = None
        self._outer: nn.Module | None = None
        """The model whose forward runs in chunks."""
        self._warned = False
        for owner in owners:
            self._hooks += [
                owner.register_forward_pre_hook(self._before, with_kwargs=True),
                owner.register_forward_hook(self._check),
                owner.register_forward_hook(self._end, always_call=True),
            ]

    def close(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._outer is not None or _paused:
            return
        if _labels(module, args, kwargs) is None:
            self._warn(module)
            return
        self._outer, self._calls = module, HeadCalls(self._name, self._chunk_tokens)
        for place in self._places:
            place.fill(self._calls)

    def _warn(self, module: nn.Module) -> None:
        if module.training and torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                f"{_FIELD} does nothing in a forward without labels, whose logits are made for all tokens; pass labels "
                "to the model, or call unishard.chunked_loss in its forward",
                UserWarning,
                stacklevel=2,
            )

    def _check(self, module: nn.Module, args: object, output: object) -> None:
        if module is self._outer and self._calls is not None and not self._calls.losses:
            titles = " or ".join(place.title for place in self._places)
            raise ModelError(
                f"{_FIELD}: {self._name} was called with labels, but computed no cross entropy of what it calls "
                f"{titles} for; leave {_FIELD} out"
            )

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if module is not self._outer or self._calls is None:
            return
        for place in self._places:
            place.clear()
        self._calls.running = False
        self._outer = self._calls = None


def _head_of(module: nn.Module) -> nn.Module | None:
    named = getattr(module, "get_output_embeddings", None)
    head = named() if callable(named) else None
    return head if isinstance(head, nn.Module) else None


def _split(name: str) -> tuple[str, str]:
    parent, _, own = name.rpartition(".")
    return parent, own


def _rows(head: nn.Module) -> int:
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelError(f"{_FIELD}: {type(head).__name__} is no linear head; leave {_FIELD} out")
    return len(weight)


def _labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args:
        return kwargs.get("labels")
    try:
        arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say it
        return None
    return arguments.get("labels", kwargs.get("labels"))
