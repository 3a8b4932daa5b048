"""Gradient norms in fp32 for any dtype, and in-place scaling of lists of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from unishard.contract.private_api import CORE_PRIVATE_API

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


# Skip an update with a non-finite gradient norm on the device, without asking the host: what `torch.amp.GradScaler`
# does.

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
"""Their fused kernels change neither parameters nor state if `found_inf` of the optimizer is 1 (torch 2.13,
optim/adam.py)."""


class DeviceSkip:
    """Skips updates of a torch optimizer on the device, where its kernels can."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._known = type(optimizer) in _KINDS and CORE_PRIVATE_API["skip-on-device"].works

    def possible(self, stepped: Sequence[Tensor], norm: Tensor, *, hooks: int = 0) -> bool:
        """Whether the coming update can be skipped on the device, with the same result as if the optimizer had not been
        called.

        Not if the update would create optimizer state, or if hooks on the optimizer would notice the call.

        Args:
            stepped: What has a gradient.
            norm: The gradient norm.
            hooks: How many hooks the engine itself has on the optimizer.
        """
        optimizer = self._optimizer
        if (
            not self._known
            or len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) != hooks
        ):
            return False
        groups, state = optimizer.param_groups, optimizer.state
        if not all(group["fused"] for group in groups) or (stepped and stepped[0].device != norm.device):
            return False
        # Of the parameters, only their number is asked, unless some have no state yet.
        return len(state) == sum([len(group["params"]) for group in groups]) or all(
            tensor in state for tensor in stepped
        )

    @contextmanager
    def unless_finite(self, norm: Tensor) -> Iterator[None]:
        """A block in which the optimizer's step does nothing if the norm is not finite."""
        self._optimizer.grad_scale, self._optimizer.found_inf = None, (~torch.isfinite(norm)).float()
        try:
            yield
        finally:
            del self._optimizer.grad_scale, self._optimizer.found_inf
