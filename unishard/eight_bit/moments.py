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

    def __init__(
        self, held: range, device: torch.device, step: int = 0, codes: Mapping[str, Tensor] | None = None
    ) -> None:
        """All zeros, of these elements of a flattened parameter.

        Args:
            held: The elements.
            device: Where they are stepped.
            step: How many updates there were.
            codes: Memory for the codes of each moment, whatever is in it; by default new one.
        """
        self.step, self.numel = step, len(held)
        self._parts = [*_parts(held)]
        blocks = self._parts[-1].blocks.stop
        self.codes = (
            {key: torch.zeros(len(held), dtype=torch.uint8, device=device) for key in MOMENTS}
            if codes is None
            else dict(codes)
        )
        where = next(iter(self.codes.values())).device
        self._scales = {key: torch.zeros(blocks, device=where) for key in MOMENTS}

    def update(
        self,
        weights: Tensor,
        gradient: Tensor,
        options: Mapping[str, Any],
        begin: int = 0,
        codes: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make update number `step`, of the shard or of some of its blocks.

        Args:
            weights: Flat and contiguous.
            gradient: Of the same dtype.
            options: Of its group.
            begin: The first of these weights in the shard.
            codes: Of these weights, where they lie in other memory.
        """
        from bitsandbytes.functional import optimizer_update_8bit_blockwise

        codes = self.codes if codes is None else codes
        beta1, beta2 = options["betas"]
        for elements, blocks in self._blocks(begin, begin + weights.numel()):
            here = slice(elements.start - begin, elements.stop - begin)
            optimizer_update_8bit_blockwise(
                "adam",
                gradient[here],
                weights[here],
                *(codes[key][here] for key in MOMENTS),
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
        for elements, blocks in self._blocks(begin, end):
            values = dequantized(self.codes[key][elements], self._scales[key][blocks], signed=MOMENTS[key])
            found.append(values[max(begin - elements.start, 0) :])
        return torch.cat(found) if found else torch.empty(0, device=self.codes[key].device)

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
            part = quantized(values[elements].to(self.codes[key].device), signed=MOMENTS[key])
            self.codes[key][elements] = part.codes
            self._scales[key][blocks] = part.scales
            changed += part.changed
        return changed

    def to(self, device: torch.device) -> Self:
        """The same, on the device where the shard is stepped."""
        for kept in (self.codes, self._scales):
            kept.update({key: value.to(device) for key, value in kept.items()})
        return self

    @property
    def tensors(self) -> list[Tensor]:
        """Codes and scales."""
        return [*self.codes.values(), *self._scales.values()]

    def _blocks(self, begin: int, end: int) -> Iterator[_BlockRange]:
        """The blocks that have these elements: to the last of them, from the first of the block in which it is."""
        for elements, blocks in self._parts:
            low, high = max(elements.start, begin), min(elements.stop, end)
            if low < high:
                first, last = (low - elements.start) // BLOCK, blocks_of(high - elements.start)
                yield _BlockRange(
                    slice(elements.start + first * BLOCK, high), slice(blocks.start + first, blocks.start + last)
                )


def _parts(held: range) -> Iterator[_BlockRange]:
    """The end of a block that begins on another rank, and the rest in pieces for one call each."""
    begin, block = 0, 0
    end = min(-held.start % BLOCK, len(held))
    while begin < len(held):
        end = end if end > begin else min(begin + _ELEMENTS, len(held))
        blocks = blocks_of(end - begin)
        yield _BlockRange(slice(begin, end), slice(block, block + blocks))
        begin, block = end, block + blocks
