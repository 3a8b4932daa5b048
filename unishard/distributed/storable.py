"""Which tensors can be sent to other ranks and stored in a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

STORABLE = frozenset({
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
})  # fmt: skip
"""The dtypes. torch cannot copy elements of the others, such as `uint4` and `bits8` (torch 2.13)."""


def obstacle(values: Tensor) -> str | None:
    """Why a tensor can be neither sent nor stored, such as `is torch.sparse_coo`; None if it can be."""
    if values.layout is not torch.strided:
        return f"is {values.layout}"
    if values.is_nested:
        return "is a nested tensor"
    if values.is_quantized or values.dtype not in STORABLE:
        return f"is {values.dtype}"
    if type(values).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(values).__name__}, which hides its memory"
    return None
