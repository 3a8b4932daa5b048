"""Find what is passed to `engine.backward` and is no loss with a graph."""

from __future__ import annotations

from torch import Tensor

from unishard.engine.guards.guard import Guard
from unishard.errors import ContractError
from unishard.failures.compared_call import ComparedCall


class UnfitLoss(Guard):
    """Refuses what has no scalar value, no graph, or no forward behind it.

    Without it: DeepSpeed ends in an error about a shape, and the other guards in theirs about a graph; a loss with
    cached gradients runs backwards that no engine knows, and trains wrongly in silence.
    """

    def before_backward(self, loss: object, call: ComparedCall) -> None:
        """Raise ContractError unless it is a loss."""
        if not isinstance(loss, Tensor):
            raise ContractError(
                f"backward needs a scalar loss tensor, got {type(loss).__name__}; pass the loss itself, such "
                "as output.loss"
            )
        if loss.dim():
            raise ContractError(
                f"backward needs a scalar loss, got shape {tuple(loss.shape)}; pass its mean, such as loss.mean()"
            )
        if not loss.requires_grad:
            raise ContractError(
                "backward needs a loss with a graph; it was computed in evaluation mode, under no_grad, detached, or "
                "from frozen parameters only"
            )
        if loss.grad_fn is None:
            raise ContractError(
                "backward got a tensor that no forward has computed, as cached losses (GradCache) return, whose hook "
                "runs backwards that no engine knows; call engine.framework.scaled_backward((embeddings * "
                "cached).sum()) for each chunk, with the gradient that was cached for its embeddings: docs/access.md"
            )
