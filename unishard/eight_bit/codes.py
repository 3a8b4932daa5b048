"""Blocks of 256 fp32 elements as one code of 8 bits each and one scale, and back.

bitsandbytes quantizes a block to the nearest of 256 levels times its largest magnitude (bitsandbytes 0.50,
functional.py, `create_dynamic_map`). Quantizing what was dequantized by the same rule gives other scales in half of the
blocks: the levels of signed values reach from -0.993 to 1, so the magnitude of a largest negative element shrinks each
time. `quantized` finds the scale that the elements had instead, so that codes of 8 bits survive a file in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
"""Elements of a block: the only size of which bitsandbytes' optimizers have kernels."""
_AT_ONCE = 2**20
"""Elements that are quantized at once, so that what is computed on the way stays small."""
_ROUNDING = 1e-6
_NEIGHBORS = (-1, 1, -2, 2)
"""By how many fp32 numbers a scale may differ from the quotient that it is computed as."""


class Quantized(NamedTuple):
    """Consecutive blocks."""

    codes: Tensor
    """uint8, one for each element."""
    scales: Tensor
    """fp32, one for each block."""
    changed: int
    """Elements whose value is another one afterwards; 0 for what was dequantized in the same blocks."""


@cache
def levels(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 values of codes in ascending order, fp32, those of bitsandbytes."""
    from bitsandbytes.functional import create_dynamic_map

    found: Tensor = create_dynamic_map(signed=signed).to(device)
    return found


def blocks_of(elements: int) -> int:
    """How many blocks some elements are."""
    return -(-elements // BLOCK)


def dequantized(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values of consecutive blocks, flat, fp32."""
    from bitsandbytes.functional import dequantize_blockwise

    values: Tensor = dequantize_blockwise(
        codes.contiguous(), absmax=scales, code=levels(codes.device, signed=signed), blocksize=BLOCK
    )
    return values.add_(0.0)  # a zero has a sign, which says nothing and is not kept


def quantized(values: Tensor, *, signed: bool) -> Quantized:
    """Blocks of values.

    Args:
        values: Flat, fp32; the last block may be shorter.
        signed: Whether some may be negative.
    """
    parts = [_quantized(part, levels(values.device, signed=signed)) for part in torch.split(values, _AT_ONCE)]
    codes, scales, changed = zip(*parts, strict=True)
    return Quantized(torch.cat(codes), torch.cat(scales), sum(changed))


def _quantized(values: Tensor, table: Tensor) -> Quantized:
    blocks = pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    highest, lowest, least = blocks.amax(1), -blocks.amin(1), -table[0]
    scales = torch.where(lowest >= highest, lowest / least, highest) if least > 0 else highest
    codes = _nearest(blocks, scales, table)
    found = table[codes.int()] * scales[:, None]
    wrong = (found != blocks).sum(1)
    # By the rounding of the quotient, the scale may be another than it was.
    rows = ((wrong > 0) & ((found - blocks).abs() <= _ROUNDING * blocks.abs()).all(1)).nonzero().view(-1)
    for away in _NEIGHBORS if rows.numel() else ():
        others = _away(scales[rows], away)
        tried = _nearest(blocks[rows], others, table)
        fits = (table[tried.int()] * others[:, None] == blocks[rows]).all(1)
        scales[rows[fits]], codes[rows[fits]], wrong[rows[fits]] = others[fits], tried[fits], 0
        rows = rows[~fits]
    return Quantized(codes.view(-1)[: values.numel()], scales, int(wrong.sum()))


def _nearest(blocks: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    divided = blocks / scales.where(scales > 0, 1.0)[:, None]
    return torch.bucketize(divided, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8)


def _away(scales: Tensor, numbers: int) -> Tensor:
    """The fp32 numbers so many places from positive ones."""
    return (scales.view(torch.int32) + numbers).view(torch.float32)
