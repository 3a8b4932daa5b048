"""Gradient norms in fp32 for any dtype, and in-place scaling of lists of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

_dtype = attrgetter("dtype")
_FOREACH: Any = getattr(torch, "foreach", None)
"""Public in torch 2.15 and later; older versions have no public function for a list of tensors."""


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all gradients together, an fp32 scalar; 0 for an empty list. Not collective."""
    if set(map(_dtype, gradients)) <= {torch.float32}:
        return get_total_norm(gradients)
    # `get_total_norm` would round the norm of each gradient to its dtype (torch 2.13).
    norms: list[Tensor] = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum().sqrt()


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a 0-d tensor on their device."""
    if _FOREACH is not None and tensors:  # fails on an empty list
        _FOREACH.mul_(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def divide(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divide tensors in place by a number."""
    if _FOREACH is not None and tensors:
        _FOREACH.div_(tensors, divisor)
    else:
        for tensor in tensors:
            tensor.div_(divisor)
