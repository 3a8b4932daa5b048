"""The norm of gradients, in fp32 whatever their format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

__all__ = ["norm_of"]


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of all of them as one vector, an fp32 scalar; 0 of none. Not collective."""
    if not gradients or all(gradient.dtype == torch.float32 for gradient in gradients):
        return get_total_norm(gradients)
    # `get_total_norm` would round the norm of each gradient to its format (torch 2.13).
    norms: list[Tensor] = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum().sqrt()
