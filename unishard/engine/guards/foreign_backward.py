"""Find a backward through this model that is not its engine's: `loss.backward()`, another engine's, or one that the
forward runs, such as for forces of an energy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unishard.contract.adapter import Updates
from unishard.contract.private_api import CORE_PRIVATE_API
from unishard.distributed.nested_tensors import tensors_in
from unishard.engine.guards.guard import Guard, WatchedModule
from unishard.engine.guards.tensor_marks import memory_of
from unishard.engine.open_blocks import OpenBlocks
from unishard.errors import ContractError

_PRIVATE = CORE_PRIVATE_API["foreign-backward"]


class ForeignBackward(Guard):
    """Refuses a backward that is not the engine's and reaches its parameters through an output of its forward, and one
    in the forward where the engine frees parameters in each backward.

    Without it: gradients are mixed, or not reduced, and the model trains on in silence; FSDP2 and stage 3 of ZeRO end
    in an error about a storage or a size that names no cause, or in SIGSEGV.
    """

    def __init__(self, updates: Updates, blocks: OpenBlocks) -> None:
        """Look at the gradients of all outputs.

        Args:
            updates: Of the model.
            blocks: Those in which the run is.
        """
        self._updates = updates
        self._blocks = blocks
        updates.on_gradient = self._on_gradient

    def called(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Look at the gradients of what a module gets that gathers.

        Raises:
            ContractError: The forward computes gradients, where it cannot.
        """
        for tensor in tensors_in((args, kwargs)) if part.is_gathered else ():
            if tensor.requires_grad and memory_of(tensor) is None:  # inside torch.func.grad
                self._updates.gradients_in_forward()
            elif tensor.requires_grad:
                tensor.register_hook(self._on_gradient_inside)  # type: ignore[no-untyped-call]

    def _on_gradient_inside(self, gradient: Tensor) -> None:
        if self._blocks.forward:
            self._updates.gradients_in_forward()

    def _on_gradient(self, gradient: Tensor) -> None:
        if self._blocks.backward:
            return
        if any(_will_accumulate(leaf) for leaf in self._updates.leaves().values() if leaf.requires_grad):
            raise ContractError(
                "a backward that is not this engine's reaches the parameters of its "
                f"{type(self._updates.model.module).__name__} and would mix gradients with its own; call this engine's "
                "backward(loss), or, if the loss trains only another model, compute and backward it inside `with "
                "engine.weights.frozen():`; if it is to train both, put both models into one nn.Module, and prepare "
                "that"
            )
        self._updates.input_gradients(graph=torch.is_grad_enabled())


def _will_accumulate(leaf: Tensor) -> bool:
    """Whether the running backward will accumulate a gradient on a leaf.

    Raises:
        ContractError: This torch version cannot tell.
    """
    if not _PRIVATE.works:
        raise ContractError(_PRIVATE.refusal())
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # for a leaf whose gradient `torch.autograd.grad` returns instead of accumulating
        return False
