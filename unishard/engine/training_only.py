"""What only an engine with an optimizer can do."""

from __future__ import annotations

from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder
from unishard.errors import ContractError


def require_training(accumulation: Accumulation | None, order: CallOrder, call: str) -> Accumulation:
    """The training loop's state, which an engine for inference has not.

    Args:
        accumulation: The state, or None for inference.
        order: The position in the loop.
        call: A method of the engine.

    Raises:
        ContractError: The engine is closed, or the model was prepared for inference.
    """
    order.require_open(call)
    if accumulation is None:
        raise ContractError(
            f"{call} needs an engine for training, but this model was prepared with train=False; prepare it "
            "without train=False, or call the engine that trains"
        )
    return accumulation
