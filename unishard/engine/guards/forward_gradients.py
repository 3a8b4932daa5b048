"""Find gradients that the forward computes of its own, such as forces of an energy: a backward for which an engine is
not ready that frees parameters in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.guards.guard import Guard, Looks, WatchedModule
from unishard.engine.guards.tensor_marks import memory_of
from unishard.engine.open_blocks import OpenBlocks


class ForwardGradients(Guard):
    """Refuses gradients in the forward where the engine cannot compute them.

    Without it: FSDP2 ends in an error about the storage of a tensor, stage 3 of ZeRO in one about sizes, and neither
    names the cause.
    """

    looks = Looks.CLOSELY

    def __init__(self, blocks: OpenBlocks, refuse: Callable[[], None]) -> None:
        """Look at nothing yet.

        Args:
            blocks: Those in which the run is.
            refuse: Raises where that is so.
        """
        self._blocks = blocks
        self._refuse = refuse

    def called(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Watch the gradients of what a module gets that gathers.

        Raises:
            ContractError: The forward computes a gradient, where it cannot.
        """
        for tensor in tensors_in((args, kwargs)) if part.is_gathered else ():
            if tensor.requires_grad and memory_of(tensor) is None:  # inside torch.func.grad
                self._refuse()
            elif tensor.requires_grad:
                tensor.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._blocks.forward:
            self._refuse()
