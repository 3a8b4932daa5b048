"""Blocks of 4-bit numbers, two in a byte, with a scale for each block, by bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unishard.contract.kit.materialization import Reader
from unishard.engine.model.quantization.storage import Storage, as_bytes, as_fp32

BLOCK = 64
"""Elements that share a scale (bitsandbytes 0.50, nn/modules.py, Params4bit)."""
NESTED_BLOCK = 256
"""Scales that share a scale, with double quantization (functional.py, quantize_4bit)."""
NUMBERS = 256
"""That 8 bits stand for."""
_FP32 = torch.float32.itemsize
_PIECE = 2**24
"""Elements that are read at a time for scales."""


@dataclass(frozen=True)
class FourBit(Storage):
    """Two elements in a byte; the scales are fp32, or 8-bit with fp32 scales and a mean of their own."""

    code: str
    """`nf4` or `fp4`."""
    double: bool
    """Whether the scales are quantized too. Their bytes are then, in fp32, the scales of the scales, their mean and the
    256 numbers that 8 bits stand for, and then the scales in 8 bits."""
    block: int = BLOCK
    dtype: torch.dtype | None = None
    """What a weight is rounded to before it is multiplied by gradients; None for the dtype of these."""

    @property
    def type(self) -> str:
        """The word of the config."""
        return self.code

    @property
    def nested(self) -> bool:
        """Whether the scales are quantized too."""
        return self.double

    @property
    def blocks(self) -> int:
        """How many scales there are."""
        return -(-self.numel // self.block)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the elements and of the scales."""
        return -(-self.numel // 2), self.blocks + self._header if self.nested else self.blocks * _FP32

    @property
    def _header(self) -> int:
        return (-(-self.blocks // NESTED_BLOCK) + 1 + NUMBERS) * _FP32

    # -- from weights to bytes -----------------------------------------------------------------------

    def readers(self, read: Reader) -> tuple[Reader, Reader]:
        """What reads parts of the elements' and of the scales' bytes, from what reads parts of the weight."""

        def elements(begin: int, end: int) -> Tensor:
            first, last = 2 * begin // self.block * self.block, -(-2 * end // self.block) * self.block
            values = _quantized(read(first, min(last, self.numel)), self.code, self.block)[0]
            return values[begin - first // 2 : end - first // 2]

        def scales(begin: int, end: int) -> Tensor:
            if self.nested:
                return nested_bytes(*_nested(torch.cat([*self._scales(read, 0, self.blocks)])))[begin:end]
            first, last = begin // _FP32, -(-end // _FP32)
            found = as_bytes(torch.cat([*self._scales(read, first, last)]))
            return found[begin - first * _FP32 : end - first * _FP32]

        return elements, scales

    def _scales(self, read: Reader, first: int, last: int) -> Iterator[Tensor]:
        """The scales of some blocks: each the largest absolute value of its block."""
        step = _PIECE // self.block
        for start in range(first, last, step):
            values = read(start * self.block, min(min(start + step, last) * self.block, self.numel)).float().abs()
            whole = values.numel() // self.block * self.block
            yield values[:whole].view(-1, self.block).amax(1)
            if whole < values.numel():
                yield values[whole:].amax().view(1)

    # -- products ------------------------------------------------------------------------------------

    def dequantized(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight `(out, in)`."""
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(elements.view(-1, 1), self._state(scales, dtype))
        return weight

    def product(self, x: Tensor, elements: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`(..., in)` times the weight, plus the bias."""
        from bitsandbytes import matmul_4bit

        product: Tensor = matmul_4bit(x, elements.view(-1, 1), self._state(scales, x.dtype), bias=bias)
        return product

    def backward_weight(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight that gradients are multiplied by."""
        return self.dequantized(elements, scales, self.dtype or dtype).to(dtype)

    def _state(self, scales: Tensor, dtype: torch.dtype) -> Any:
        from bitsandbytes.functional import QuantState

        common = {"shape": torch.Size(self.shape), "blocksize": self.block, "quant_type": self.code, "dtype": dtype}
        if not self.nested:
            return QuantState(as_fp32(scales), **common)
        header, of_blocks = as_fp32(scales[: self._header]), scales[self._header :]
        of_scales, mean, numbers = header[: -NUMBERS - 1], header[-NUMBERS - 1], header[-NUMBERS:]
        inner = QuantState(of_scales, code=numbers, blocksize=NESTED_BLOCK, dtype=torch.float32)
        return QuantState(of_blocks, offset=mean, state2=inner, **common)


def nested_bytes(scales: Tensor, state: Any, mean: Tensor) -> Tensor:
    """The bytes of scales that are quantized too.

    Args:
        scales: In 8 bits.
        state: Of bitsandbytes, with their own scales and the numbers that 8 bits stand for.
        mean: What was subtracted from them.
    """
    header = (state.absmax.float(), mean.float().view(1), state.code.float())
    return torch.cat([*map(as_bytes, header), as_bytes(scales)])


def _nested(scales: Tensor) -> tuple[Tensor, Any, Tensor]:
    """Quantize scales, as `quantize_4bit` of bitsandbytes does."""
    from bitsandbytes.functional import quantize_blockwise

    mean = scales.mean()
    quantized, state = quantize_blockwise(scales - mean, blocksize=NESTED_BLOCK)
    return quantized, state, mean


def _quantized(values: Tensor, code: str, block: int) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import quantize_4bit

    elements, state = quantize_4bit(values.float().contiguous(), blocksize=block, quant_type=code)
    return elements.view(-1), state
