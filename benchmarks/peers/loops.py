"""The loops of a cell, by who wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from benchmarks.peers import by_hand, with_accelerate, with_unishard
from benchmarks.peers.cell import Cell

Loop = Callable[[Cell], Iterator[Tensor]]
"""Its first `next` prepares everything and makes the first optimizer step."""

_LOOPS: dict[tuple[str, str], Loop] = {
    ("by hand", "fsdp"): by_hand.fsdp,
    ("by hand", "deepspeed"): by_hand.deepspeed,
    ("Accelerate", "fsdp"): with_accelerate.fsdp,
    ("Accelerate", "deepspeed"): with_accelerate.deepspeed,
    ("unishard", "fsdp"): with_unishard.train,
    ("unishard", "deepspeed"): with_unishard.train,
}


def loop_of(candidate: str, cell: Cell) -> Iterator[Tensor]:
    """A candidate's loop, not started."""
    return _LOOPS[candidate, cell.engine](cell)
