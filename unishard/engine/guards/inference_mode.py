"""Treat `torch.inference_mode()` around an engine's calls as `torch.no_grad()`.

Engines keep tensors from one call to the next: gathered parameters, buckets, optimizer state. Those that are made in
inference mode can never be part of a graph again, so that the training after an evaluation in it would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.distributed.nested_tensors import replace_tensors
from unishard.engine.guards.guard import Guard, Looks, WatchedModule

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def as_no_grad() -> Iterator[None]:
    """A block in which inference mode, if it is on, is no more than `torch.no_grad`."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_inference_mode(block: Callable[P, AbstractContextManager[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Decorate a function that returns a context manager: inference mode is `no_grad` while it is entered, inside, and
    while it is left.
    """

    @wraps(block)
    @contextmanager
    def both(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        with as_no_grad(), block(*args, **kwargs) as value:
            yield value

    return both


def as_no_grad_in_forward(module: nn.Module) -> list[RemovableHandle]:
    """Do the same for the forward of a module that is called by itself. Call it after all other hooks were registered.

    Returns:
        Handles of the hooks.
    """
    open_blocks: list[ExitStack | None] = []

    def enter(called: nn.Module, args: Any, kwargs: Any) -> Any:
        if called is not module:  # a copy of it
            return None
        if not torch.is_inference_mode_enabled():
            open_blocks.append(None)
            return None
        open_blocks.append(block := ExitStack())
        block.enter_context(as_no_grad())
        return without_inference_tensors(args), without_inference_tensors(kwargs)

    def leave(called: nn.Module, args: Any, output: Any) -> None:
        if called is module and open_blocks and (block := open_blocks.pop()) is not None:
            block.close()

    return [
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]


class InferenceInForward(Guard):
    """Runs modules that a forward calls in inference mode under `no_grad`.

    In the forwards that are looked at, since the first one makes the tensors that the later ones fill.

    Without it: FSDP2 keeps the weights that it gathers there, and a later backward ends in an error about them, or
    under `shard_grad_op` trains wrongly in silence.
    """

    looks = Looks.CLOSELY

    def __init__(self) -> None:
        self._open: list[ExitStack] = []
        """Blocks of the modules that run."""

    def called(self, part: WatchedModule, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Enter a block around a module that gathers."""
        if not part.is_gathered:
            return None
        self._open.append(block := ExitStack())
        if not torch.is_inference_mode_enabled():
            return None
        block.enter_context(as_no_grad())
        return without_inference_tensors(args), without_inference_tensors(kwargs)

    def returned(self, part: WatchedModule, output: Any) -> None:
        """Leave it."""
        if part.is_gathered and self._open:
            self._open.pop().close()


def without_inference_tensors(value: Any) -> Any:
    """The same value with copies of tensors that were made in inference mode, which nothing may write to outside it."""
    return replace_tensors(value, _copied)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
