"""Count the items of an accumulation window's losses, so that its gradients become those of one mean."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.distributed import host_numbers
from unishard.distributed.host_read import HostRead
from unishard.errors import ContractError


class LossKind(Enum):
    """What the losses of a window are, in the words of an error."""

    MEAN = "without num_items"
    COUNTED = "with num_items"
    SCALED = "by framework.scaled_backward"


class Items:
    """The items (tokens, samples) of one accumulation window, over its micro-batches and the ranks."""

    def __init__(self) -> None:
        self._kind = LossKind.MEAN
        self._number = 0
        """Those counted in Python."""
        self._total: Tensor | None = None
        """Those counted on a device."""
        self._read: HostRead | None = None
        self._everyones: Callable[[], int] | None = None
        """Waits for the sum over all ranks, once that is on its way."""
        self._micro_batches = 0

    def add(self, count: int | Tensor | None, kind: LossKind, *, begins: bool, last: bool) -> None:
        """Add a loss's items on this rank, before its backward is queued; waits for nothing.

        Collective for the last one.

        Args:
            count: None if they are not counted.
            kind: What its loss is.
            begins: Whether it is the first loss of its micro-batch.
            last: Whether it is the last of its window. What was counted in Python is then added up over
                the ranks during the backward; what was counted in tensors travels to the host, behind the forward, and
                the update waits for it while the device still has the backward to do.

        Raises:
            ContractError: `count` is not a whole number of at least 0, or the window has losses of the other kind.
        """
        if self._micro_batches and kind is not self._kind:
            raise ContractError(
                f"backward was called {self._kind.value} and {kind.value} in one accumulation window; call it the same "
                "way for every micro-batch of a window"
            )
        self._kind = kind
        if count is not None:
            if isinstance(count, Tensor):
                _require(
                    not (
                        count.is_floating_point()
                        or count.is_complex()
                        or count.dtype == torch.bool
                        or count.numel() != 1
                    ),
                    count,
                )
                number = count.detach().reshape(()).to(torch.int64)
                self._total = number if self._total is None else self._total + number.to(self._total.device)
            else:
                self._number += _whole(count)
        if last and self._total is not None:
            self._read = HostRead(self._total)
        elif last and kind is LossKind.COUNTED:
            self._everyones = host_numbers.start_total(self._number)
        self._micro_batches += begins

    def divisor(self, *, undivided: bool) -> float:
        """Divisor of the gradients, which are summed over the window and averaged over the ranks.

        Collective if items were counted.

        Args:
            undivided: Whether mean losses were not divided by the length of the window, which was not known yet.

        Raises:
            ContractError: On every rank: the window has no items.
        """
        if self._kind is not LossKind.COUNTED:
            return float(self._micro_batches) if undivided and self._kind is LossKind.MEAN else 1.0
        if self._everyones is None:
            counted = self._read if self._read is not None or self._total is None else HostRead(self._total)
            self._everyones = host_numbers.start_total(self._number + (0 if counted is None else int(counted.get())))
        number = self._everyones()
        if number < 1:
            raise ContractError(
                f"num_items add up to {number} over the accumulation window and all ranks; skip batches without items"
            )
        return number / dist.get_world_size()

    def clear(self) -> None:
        """Reset at the end of a window."""
        self._kind, self._number, self._micro_batches = LossKind.MEAN, 0, 0
        self._total = self._read = self._everyones = None


def _whole(count: object) -> int:
    try:
        number = -1 if isinstance(count, bool) else index(count)  # type: ignore[arg-type]  # refuses what is no whole number
    except TypeError:
        number = -1
    _require(number >= 0, count)
    return number


def _require(valid: bool, count: object) -> None:
    if not valid:
        raise ContractError(
            f"num_items must be a whole number of at least 0, got {count!r}; pass how many items the loss sums over"
        )
