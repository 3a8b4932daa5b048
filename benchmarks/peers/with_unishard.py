"""The same training through unishard: one loop for both engines."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import unishard
from benchmarks.peers.cell import BETAS, CLIP, DECAY, EPS, LR, Cell

__all__ = ["config", "train"]


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
    for batch in engine.batches(cell.micro_batches(engine.rank)):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(loss.detach())
        if engine.step().ended:
            yield torch.stack(losses).mean()
            losses = []
