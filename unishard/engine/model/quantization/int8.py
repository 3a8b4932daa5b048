"""Rows of 8-bit numbers with a scale for each row: LLM.int8 of bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unishard.contract.kit.materialization import Reader
from unishard.engine.model.quantization.storage import Storage, as_bytes, as_fp32

OUTLIER = 6.0
"""Inputs beyond it are multiplied in 16 bits where bitsandbytes quantizes inputs too, which is not on the CPU
(transformers' `llm_int8_threshold`)."""
_FP32 = torch.float32.itemsize
_LARGEST = 127


@dataclass(frozen=True)
class Int8(Storage):
    """One element in a byte; a scale is the largest absolute value of its row, in fp32."""

    threshold: float = OUTLIER

    @property
    def type(self) -> str:
        """The word of the config."""
        return "int8"

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the elements and of the scales."""
        return self.numel, self.shape[0] * _FP32

    def readers(self, read: Reader) -> tuple[Reader, Reader]:
        """What reads parts of the elements' and of the scales' bytes, from what reads parts of the weight."""
        row = self.shape[1]

        def rows(first: int, last: int) -> tuple[Tensor, Tensor]:
            from bitsandbytes.functional import int8_vectorwise_quant

            values = read(first * row, last * row).view(-1, row).to(torch.float16)  # as in Int8Params
            found = int8_vectorwise_quant(values)
            return as_bytes(found[0]), as_bytes(found[1])

        def elements(begin: int, end: int) -> Tensor:
            first = begin // row
            return rows(first, -(-end // row))[0][begin - first * row : end - first * row]

        def scales(begin: int, end: int) -> Tensor:
            first = begin // _FP32
            return rows(first, -(-end // _FP32))[1][begin - first * _FP32 : end - first * _FP32]

        return elements, scales

    def dequantized(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight `(out, in)`."""
        weight = elements.view(torch.int8).view(self.shape).to(dtype)
        return weight.mul_(as_fp32(scales).unsqueeze(1).mul(1 / _LARGEST))

    def product(self, x: Tensor, elements: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`(..., in)` times the weight, plus the bias."""
        from bitsandbytes import MatmulLtState, matmul

        weight, state = elements.view(torch.int8).view(self.shape), MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights, state.threshold = weight, as_fp32(scales), False, self.threshold
        state.is_training = True  # on the CPU, dequantized weights are multiplied; else inputs would be quantized too
        product: Tensor = matmul(x, weight, bias=bias, state=state)
        return product

    def backward_weight(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight that gradients are multiplied by."""
        return self.dequantized(elements, scales, dtype)
