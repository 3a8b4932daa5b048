"""With Lightning's Trainer."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from benchmarks.frameworks.cases import Case, config
from benchmarks.frameworks.paused import Pause
from benchmarks.peers.by_hand import adamw
from benchmarks.peers.cell import CLIP, Batch

__all__ = ["train"]


class Batches(torch.utils.data.IterableDataset[Batch]):
    """A rank's own micro-batches, without end."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __iter__(self) -> Iterator[Batch]:
        return self._case.micro_batches(dist.get_rank())


class Module(lightning.LightningModule):
    """Trains the model of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.net = case, case.build()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Batch) -> torch.Tensor:
        """One micro-batch."""
        loss: torch.Tensor = self.net(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As everywhere here."""
        return adamw(self)


class Parallel(Module):
    """With FSDP2, as the guide of ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        """Shard the layers, and the rest."""
        mesh = self.device_mesh["data_parallel"]
        again = self.case.strategy == "full_shard"
        for unit in (*self.case.units(self.net), self.net):
            fully_shard(unit, mesh=mesh, reshard_after_forward=again)


class Told(lightning.Callback):
    """Pauses after each update."""

    def __init__(self, pause: Pause) -> None:
        self._pause, self._steps = pause, 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        """Called after each micro-batch."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            losses, module.losses = torch.stack(module.losses).mean(), []
            self._pause(losses)


def train(side: str, case: Case, pause: Pause) -> None:
    """A program with `Trainer(...).fit(module)`."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    kind: Any = Module
    strategy: Any = "ddp"
    ranks = int(os.environ["WORLD_SIZE"])
    if side == "unishard":
        from unishard.integrations.lightning import UnishardStrategy

        strategy = UnishardStrategy(config(case))
    elif case.strategy != "no_shard":
        strategy, kind = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1), Parallel
    trainer = lightning.Trainer(
        strategy=strategy, devices=ranks, accelerator="cpu", max_steps=sys.maxsize, max_epochs=-1,
        accumulate_grad_batches=case.size.accumulation, gradient_clip_val=CLIP, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, callbacks=[Told(pause)],
    )  # fmt: skip
    trainer.fit(kind(case), torch.utils.data.DataLoader(Batches(case), batch_size=None))
