"""Find gradients that the forward computes of its own, such as forces of an energy: a backward for which an engine is
not ready that frees parameters in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.guards.guard import Guard, Looks, LoopState
from unishard.engine.guards.tensor_marks import memory_of


class ForwardGradients(Guard):
    """Refuses gradients in the forward where the engine cannot compute them.

    Without it: FSDP2 ends in an error about the storage of a tensor, stage 3 of ZeRO in one about sizes, and neither
    names the cause.
    """

    looks = Looks.CLOSELY

    def __init__(self, modules: Iterable[nn.Module], place: LoopState, refuse: Callable[[], None]) -> None:
        """Look at nothing yet.

        Args:
            modules: Those through which a forward may not compute gradients of its own.
            place: Where the loop is.
            refuse: Raises where that is so.
        """
        self._modules = [*modules]
        self._place = place
        self._refuse = refuse

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """The block that runs a forward that is looked at.

        Raises:
            ContractError: The forward computes a gradient, where it cannot.
        """
        hooks = [
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True) for module in self._modules
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and memory_of(tensor) is None:  # inside torch.func.grad
                self._refuse()
            elif tensor.requires_grad:
                tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._place.inside_forward:
            self._refuse()
