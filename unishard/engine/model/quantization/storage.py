"""What is common to all ways to store a weight in few bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from unishard.contract.kit.materialization import Reader


@dataclass(frozen=True)
class Storage(ABC):
    """How a weight `(out, in)` lies in two tensors of bytes: its elements, and the scales that they have in common."""

    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.shape[0] * self.shape[1]

    @property
    @abstractmethod
    def type(self) -> str:
        """The word of the config."""

    @property
    def nested(self) -> bool:
        """Whether the scales are quantized too."""
        return False

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Bytes of the elements and of the scales."""

    @abstractmethod
    def readers(self, read: Reader) -> tuple[Reader, Reader]:
        """What reads parts of the elements' and of the scales' bytes, from what reads parts of the weight."""

    @abstractmethod
    def dequantized(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight `(out, in)`.

        Args:
            elements: Flat uint8.
            scales: Flat uint8.
            dtype: Of the result.
        """

    @abstractmethod
    def product(self, x: Tensor, elements: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """`(..., in)` times the weight, plus the bias: `(..., out)`, in the dtype of `x`. Has no graph."""

    @abstractmethod
    def backward_weight(self, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight that gradients are multiplied by, in the dtype of the gradients."""


def as_fp32(values: Tensor) -> Tensor:
    """Bytes as the fp32 numbers that they are; a copy only where they lie at an odd place, as gathered ones may."""
    aligned = values.storage_offset() % torch.float32.itemsize == 0
    return (values if aligned else values.clone()).view(torch.float32)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of a tensor, flat."""
    return values.detach().contiguous().view(-1).view(torch.uint8)
