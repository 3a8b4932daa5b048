"""Skip an update with a non-finite gradient norm on the device, without asking the host: what `torch.amp.GradScaler`
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unishard.contract.optimizer_state import is_kept
from unishard.contract.private_api import CORE_PRIVATE_API

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

        Not if the update would create optimizer state, if that does not lie beside what is stepped, or if hooks on the
        optimizer would notice the call.

        Args:
            stepped: What has a gradient.
            norm: The gradient norm.
            hooks: How many hooks the engine itself has on the optimizer.
        """
        optimizer = self._optimizer
        if (
            not self._known
            or is_kept(optimizer)
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
