"""Muon: the momentum of each matrix, made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from unishard.matrices.matrix_optimizer import MatrixOptimizer
from unishard.matrices.owners import Matrix

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Muon(MatrixOptimizer):
    """`torch.optim.Muon` (torch 2.13) on shards, and AdamW for groups with `matrices=False`, in one optimizer."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bf16",
    ) -> None:
        """Hold parameters.

        Args:
            params: As in `MatrixOptimizer`.
            lr: Learning rate.
            weight_decay: Decoupled, as in AdamW.
            momentum: Decay rate of the average of gradients.
            nesterov: Whether the average is looked ahead: averaged with the gradient once more.
            ns_coefficients: Of the Newton-Schulz iterations.
            eps: The least norm by which a matrix is divided before them.
            ns_steps: How many there are.
            adjust_lr_fn: `original` (the default) multiplies the rate of an m x n matrix by sqrt(max(1, m / n)),
                `match_rms_adamw` by 0.2 * sqrt(max(m, n)).
            ns_dtype: Of the iterations: `bf16`, as in torch, or `fp32`, which doubles the bytes that are exchanged.

        Raises:
            ValueError: A parameter of matrices has neither two nor three dimensions, or an option has an unknown word.
        """
        if ns_dtype not in _DTYPES:
            raise ValueError(f"ns_dtype must be one of {', '.join(_DTYPES)}, got {ns_dtype!r}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn must be original or match_rms_adamw, got {adjust_lr_fn!r}")
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
        )

    def accumulate(self, gradient: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> Tensor:
        """The momentum, or Nesterov's."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - options["momentum"])
        return gradient.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum

    def update(self, matrix: Matrix, gradient: Tensor, state: dict[str, Any], options: Mapping[str, Any]) -> Tensor:
        """The nearest orthogonal matrix, roughly."""
        return newton_schulz(gradient, options["ns_coefficients"], options["ns_steps"], options["eps"])

    def rate(self, shape: Sequence[int], options: Mapping[str, Any]) -> float:
        """The learning rate, adjusted to the shape of a matrix."""
        rows, columns = shape[-2:]
        if options["adjust_lr_fn"] == "match_rms_adamw":
            return float(options["lr"]) * (0.2 * math.sqrt(max(rows, columns)))
        return float(options["lr"]) * math.sqrt(max(1, rows / columns))

    def sent_as(self, options: Mapping[str, Any]) -> torch.dtype:
        """The dtype of the iterations, to which torch rounds the momentum first, too."""
        return _DTYPES[options.get("ns_dtype", "bf16")]


def newton_schulz(gradient: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Make the singular values of a matrix about 1 (0.7 to 1.2), in its own dtype.

    The operations of `torch.optim.Muon` in the same order (torch 2.13, optim/_muon.py), on one matrix or on several.

    Args:
        gradient: Of shape (m, n), or (k, m, n) for k matrices.
        coefficients: Of the polynomial.
        steps: Iterations.
        eps: The least norm by which a matrix is divided.
    """
    a, b, c = coefficients
    add = torch.addmm if gradient.dim() == 2 else torch.baddbmm
    tall = gradient.size(-2) > gradient.size(-1)
    each = gradient.mT if tall else gradient
    norm = each.norm() if each.dim() == 2 else each.norm(dim=(-2, -1), keepdim=True)
    each = each / norm.clamp(min=eps)
    for _ in range(steps):
        gram = each @ each.mT
        each = add(each, add(gram, gram, gram, beta=b, alpha=c), each, beta=a)
    return each.mT if tall else each
