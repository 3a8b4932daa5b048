"""The norm of gradients, in fp32 whatever their format, and the scaling of lists of them in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

__all__ = ["divide", "multiply", "norm_of"]

_FOREACH: Any = getattr(torch, "foreach", None)
"""Public from torch 2.15 on; before that torch has no public function over a list of tensors."""


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all of them as one vector, an fp32 scalar; 0 of none. Not collective."""
    if not gradients or all(gradient.dtype == torch.float32 for gradient in gradients):
        return get_total_norm(gradients)
    # `get_total_norm` would round the norm of each gradient to its format (torch 2.13).
    norms: list[Tensor] = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum().sqrt()


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each of them by a tensor without dimensions on their device, in place."""
    if _FOREACH is not None and tensors:  # it refuses an empty list
        _FOREACH.mul_(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def divide(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide each of them by a number, in place."""
    if _FOREACH is not None and tensors:
        _FOREACH.div_(tensors, divisor)
    else:
        for tensor in tensors:
            tensor.div_(divisor)
