"""What is trained: the cells, the models by config, their batches, and the settings that all loops share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.sized_llama import llama_of

ENGINES = ("fsdp", "deepspeed")
STRATEGIES = ("full_shard", "shard_grad_op")
PRECISIONS = ("fp32", "bf16")
CANDIDATES = ("by hand", "Accelerate", "unishard")

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 1.0
"""Of AdamW, without a schedule, and of the gradient norm."""
BATCHES = 8
"""Different micro-batches of a rank; they come again and again."""

Batch = dict[str, Tensor]


class Size(NamedTuple):
    """A Llama, and what one rank trains it on in an optimizer step."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    """Samples of a micro-batch."""
    length: int
    accumulation: int
    weight: int
    """Its part of the time, relative to the others."""


SIZES = {
    "tiny": Size(32, 96, 2, 4, 128, 2, 16, 2, 1),
    "25m": Size(384, 1152, 10, 6, 8192, 2, 16, 2, 2),
    "120m": Size(768, 2048, 12, 12, 23040, 1, 32, 1, 4),
}
"""So that a step takes about a second or less on one core a rank."""


class Cell(NamedTuple):
    """One comparison."""

    engine: str
    strategy: str
    precision: str
    model: str
    """A name in `SIZES`."""

    @property
    def size(self) -> Size:
        """Of the model."""
        return SIZES[self.model]

    def build(self) -> nn.Module:
        """The same random weights on every call, in fp32."""
        return llama_of(self.size)

    def micro_batches(self, rank: int) -> Iterator[Batch]:
        """Those of a rank, without end."""
        size, generator = self.size, torch.Generator().manual_seed(rank)
        tokens = torch.randint(0, size.vocabulary, (BATCHES, size.batch, size.length), generator=generator)
        return cycle([{"input_ids": rows, "labels": rows} for rows in tokens])

    def __str__(self) -> str:
        return " ".join(self)
