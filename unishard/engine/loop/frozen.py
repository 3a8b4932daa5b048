"""Lets another model's loss pass through a model that is trained beside it, as a generator's passes through a discriminator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unishard.errors import ContractError
from unishard.patches import CORE_PATCHES

__all__ = ["Passing", "tensors_in"]

_FOREIGN = CORE_PATCHES["foreign-backward"]


class Passing(ABC):
    """Part of a training engine: `frozen`, and the watch for gradients that come from elsewhere."""

    _module: nn.Module
    _is_frozen = False
    _in_backward = False
    """Whether a backward of this engine runs."""

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Forwards inside pass gradients on to their inputs and leave none on this model's parameters. Collective.

        For the loss of another engine that is computed through this model: keep its `backward` inside as well, since activation
        checkpointing runs the forward again there. Neither the accumulation window nor the gradients of this engine change.
        """
        self._require_open("frozen")
        self._at_rest()
        trainable = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        was, self._is_frozen = self._is_frozen, True
        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            yield
        finally:
            self._is_frozen = was
            self._at_rest()
            for parameter in trainable:
                parameter.requires_grad_(True)

    def _forward_frozen(self, *args: Any, **kwargs: Any) -> Any:
        """Through the module and not through what a backend wraps it in, which would wait for gradients."""
        return self._module(*args, **kwargs)

    def _at_rest(self) -> None:  # noqa: B027 (most engines swap nothing)
        """Give the module the parameters that it has between steps, where an engine swaps them."""

    def _leaves(self) -> Iterable[Tensor]:
        """The tensors on which autograd leaves this model's gradients."""
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _watch(self, output: Any) -> None:
        """See to it that only this engine's own backward reaches this model's parameters through an output of its forward."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        if not self._in_backward and any(map(_will_accumulate, self._leaves())):
            raise ContractError(
                f"a backward that is not this engine's reaches the parameters of its {type(self._module).__name__}, where the gradients "
                "would be mixed with its own; call this engine's backward(loss), or, if only another model is to learn from this loss, "
                "compute and backward it inside `with engine.frozen():`"
            )

    @abstractmethod
    def _require_open(self, call: str) -> None:
        """Refuse a call on a closed engine."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def _will_accumulate(leaf: Tensor) -> bool:
    """Whether the running backward will leave a gradient on a leaf.

    Raises:
        ContractError: This torch does not say.
    """
    if not _FOREIGN.works:
        raise ContractError(_FOREIGN.refusal())
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a leaf that `torch.autograd.grad` returns the gradient of, and leaves none on
        return False
