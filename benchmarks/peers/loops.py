"""The loops of a cell, by who wrote them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import unishard
from benchmarks.peers import by_hand, with_accelerate
from benchmarks.peers.cell import BETAS, CLIP, DECAY, EPS, LR, Batch, Cell

# -- The same training through unishard: one loop for both engines ---------------------------------


class Loader:
    """A loader that says its length, as most do. Without one, unishard compares the ranks' numbers of batches before
    each window.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


def config(cell: Cell) -> unishard.Config:
    """The config of a cell; everything that it leaves out has unishard's default."""
    size = cell.size
    return unishard.Config.model_validate(
        {
            "backend": cell.engine,
            "sharding": cell.strategy,
            "precision": cell.precision,
            "training": {
                "micro_batch_size": size.batch,
                "gradient_accumulation_steps": size.accumulation,
                "gradient_clipping": CLIP,
            },
            "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
        }
    )


def train(cell: Cell) -> Iterator[Tensor]:
    """The loop of the README."""
    engine = unishard.prepare(cell.build(), config(cell))
    losses = []
    for batch in engine.batches(Loader(cell.micro_batches(engine.rank))):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(loss.detach())
        if engine.step().ended:
            yield torch.stack(losses).mean()
            losses = []


Loop = Callable[[Cell], Iterator[Tensor]]
"""Its first `next` prepares everything and makes the first optimizer step."""

_LOOPS: dict[tuple[str, str], Loop] = {
    ("by hand", "fsdp"): by_hand.fsdp,
    ("by hand", "deepspeed"): by_hand.deepspeed,
    ("Accelerate", "fsdp"): with_accelerate.fsdp,
    ("Accelerate", "deepspeed"): with_accelerate.deepspeed,
    ("unishard", "fsdp"): train,
    ("unishard", "deepspeed"): train,
}


def loop_of(candidate: str, cell: Cell) -> Iterator[Tensor]:
    """A candidate's loop, not started."""
    return _LOOPS[candidate, cell.engine](cell)
