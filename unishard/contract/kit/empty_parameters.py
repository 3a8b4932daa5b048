"""Empty parameters, such as the weight of `nn.Linear(0, 8)`: they have a name and a shape, and nothing to train."""

from __future__ import annotations

from torch import Tensor, nn

_EMPTY = "_unishard_empty"
"""An attribute of the parameter, since engines change the shape that a parameter has on a rank."""


def freeze_empty(model: nn.Module) -> None:
    """Freeze parameters without elements: engines wait for their gradients or reduce them, and neither is possible
    (torch 2.13).
    """
    for parameter in model.parameters():
        if not parameter.numel():
            parameter.requires_grad_(False)
            setattr(parameter, _EMPTY, True)


def is_empty(parameter: Tensor) -> bool:
    """Whether a parameter had no elements before it was sharded."""
    return hasattr(parameter, _EMPTY)
