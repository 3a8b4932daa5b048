"""Counts what the losses of an accumulation window are sums over, so that its gradients become those of one mean."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.errors import ContractError

__all__ = ["Items"]


class Items:
    """The items (tokens, samples) of one accumulation window, over its micro-batches and over the ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total: Tensor | None = None
        self._losses = 0

    def add(self, count: int | Tensor | None) -> None:
        """One micro-batch's items on this rank, or None if its loss is a mean already.

        Raises:
            ContractError: Not a whole number of at least 0, or the window has losses of the other kind.
        """
        if self._losses and (count is None) is not (self._total is None):
            raise ContractError(
                "backward was called with num_items and without it in one accumulation window; pass it for every micro-batch, or for none"
            )
        if count is not None:
            number = torch.as_tensor(count, device=self._device)
            whole = not (number.is_floating_point() or number.is_complex() or number.dtype == torch.bool)
            if number.numel() != 1 or not whole or (not isinstance(count, Tensor) and count < 0):
                raise ContractError(
                    f"num_items must be a whole number of at least 0, got {count!r}; pass how many items the loss sums over"
                )
            # A tensor is not looked at here: that would make the host wait for the device in every micro-batch.
            number = number.detach().reshape(()).to(torch.int64)
            self._total = number if self._total is None else self._total + number
        self._losses += 1

    def divisor(self) -> float:
        """What the gradients, summed over the window and averaged over the ranks, must be divided by. Collective if items were counted.

        Raises:
            ContractError: On every rank: there is no item in the whole window.
        """
        if self._total is None:
            return 1.0
        total = self._total.clone()
        dist.all_reduce(total)
        number = int(total.item())
        if number < 1:
            raise ContractError(
                f"num_items add up to {number} over the whole accumulation window and all ranks; leave out batches without items"
            )
        return number / dist.get_world_size()

    def clear(self) -> None:
        """The window is over."""
        self._total, self._losses = None, 0
