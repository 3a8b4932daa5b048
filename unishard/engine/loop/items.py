"""Count the items of an accumulation window's losses, so that its gradients become those of one mean."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.errors import ContractError

__all__ = ["Items"]


class Items:
    """The items (tokens, samples) of one accumulation window, over its micro-batches and the ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total: Tensor | None = None
        self._losses = 0

    def add(self, count: int | Tensor | None) -> None:
        """Add one micro-batch's items on this rank; None if its loss is already a mean.

        Raises:
            ContractError: `count` is not a whole number of at least 0, or the window has losses of the other kind.
        """
        if self._losses and (count is None) is not (self._total is None):
            raise ContractError(
                "backward was called with num_items and without it in one accumulation window; pass it for every micro-batch, or for none"
            )
        if count is not None:
            number = torch.as_tensor(count, device=self._device)
            integral = not (number.is_floating_point() or number.is_complex() or number.dtype == torch.bool)
            if number.numel() != 1 or not integral or (not isinstance(count, Tensor) and count < 0):
                raise ContractError(
                    f"num_items must be a whole number of at least 0, got {count!r}; pass how many items the loss sums over"
                )
            # Do not read a tensor's value here: the host would wait for the device in every micro-batch.
            number = number.detach().reshape(()).to(torch.int64)
            self._total = number if self._total is None else self._total + number
        self._losses += 1

    def divisor(self) -> float:
        """Divisor of the gradients, which are summed over the window and averaged over the ranks. Collective if items were counted.

        Raises:
            ContractError: On every rank: the window has no items.
        """
        if self._total is None:
            return 1.0
        total = self._total.clone()
        dist.all_reduce(total)
        number = int(total.item())
        if number < 1:
            raise ContractError(f"num_items add up to {number} over the accumulation window and all ranks; skip batches without items")
        return number / dist.get_world_size()

    def clear(self) -> None:
        """Reset at the end of a window."""
        self._total, self._losses = None, 0
