"""The state of AdamW for one rank's shard of a parameter: in 8 bits, or in full for small parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from unishard.eight_bit.codes import BLOCK, blocks_of, dequantized, levels, quantized

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The two moments by the names that torch's AdamW has for them, and whether they have a sign."""
_ELEMENTS = 2**30
"""Elements for one call of a kernel, which counts them in 32 bits."""


class _BlockRange(NamedTuple):
    """Elements of a shard that begin with a block."""

    elements: slice
    blocks: slice


class Moments8bit:
    """Both moments as codes and scales, and the number of updates.

    Blocks are those of the whole parameter: 256 elements from its first on. So they are the same on any number of
    ranks, but where a shard begins or ends inside a block: of that, each rank has a block of its own.
    """

    def __init__(self, held: range, device: torch.device, step: int = 0) -> None:
        """All zeros, of these elements of a flattened parameter."""
        self.step = step
        self._parts = [*_parts(held)]
        blocks = self._parts[-1].blocks.stop
        self._codes = {key: torch.zeros(len(held), dtype=torch.uint8, device=device) for key in MOMENTS}
        self._scales = {key: torch.zeros(blocks, device=device) for key in MOMENTS}

    def update(self, weights: Tensor, gradient: Tensor, options: Mapping[str, Any]) -> None:
        """Update weights.

        Args:
            weights: The shard, flat and contiguous.
            gradient: Of the same dtype.
            options: Of its group.
        """
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        self.step += 1
        beta1, beta2 = options["betas"]
        for elements, blocks in self._parts:
            optimizer_update_8bit_blockwise(
                "adam",
                gradient[elements],
                weights[elements],
                *(self._codes[key][elements] for key in MOMENTS),
                beta1,
                beta2,
                0.0,
                0.0,
                options["eps"],
                self.step,
                float(options["lr"]),
                *(levels(weights.device, signed=signed) for signed in MOMENTS.values()),
                *(self._scales[key][blocks] for key in MOMENTS),
                weight_decay=options["weight_decay"],
            )

    def read(self, key: str, begin: int, end: int) -> Tensor:
        """Elements of a moment: new memory, flat, fp32; `begin` and `end` count from the start of the shard."""
        found = []
        for elements, blocks in self._parts:
            low, high = max(elements.start, begin), min(elements.stop, end)
            if low < high:
                first = (low - elements.start) // BLOCK
                at, last = elements.start + first * BLOCK, blocks.start + blocks_of(high - elements.start)
                scales = self._scales[key][blocks.start + first : last]
                values = dequantized(self._codes[key][at:high], scales, signed=MOMENTS[key])
                found.append(values[low - at :])
        return torch.cat(found) if found else torch.empty(0, device=self._codes[key].device)

    def write(self, key: str, values: Tensor) -> int:
        """Set a moment.

        Args:
            key: Which.
            values: Of the whole shard, flat, fp32, on any device.

        Returns:
            How many elements have another value than was given.
        """
        changed = 0
        for elements, blocks in self._parts:
            part = quantized(values[elements].to(self._codes[key].device), signed=MOMENTS[key])
            self._codes[key][elements] = part.codes
            self._scales[key][blocks] = part.scales
            changed += part.changed
        return changed

    def to(self, device: torch.device) -> Self:
        """The same, on the device where the shard is stepped."""
        for kept in (self._codes, self._scales):
            kept.update({key: value.to(device) for key, value in kept.items()})
        return self

    @property
    def tensors(self) -> list[Tensor]:
        """Codes and scales."""
        return [*self._codes.values(), *self._scales.values()]


def _parts(held: range) -> Iterator[_BlockRange]:
    """The end of a block that begins on another rank, and the rest in pieces for one call each."""
    begin, block = 0, 0
    end = min(-held.start % BLOCK, len(held))
    while begin < len(held):
        end = end if end > begin else min(begin + _ELEMENTS, len(held))
        blocks = blocks_of(end - begin)
        yield _BlockRange(slice(begin, end), slice(block, block + blocks))
        begin, block = end, block + blocks
