"""With Lightning's Fabric."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.frameworks.cases import Case, config
from benchmarks.frameworks.paused import Pause
from benchmarks.peers.by_hand import adamw
from benchmarks.peers.cell import CLIP

__all__ = ["train"]


def train(side: str, case: Case, pause: Pause) -> None:
    """A loop of Fabric's guide."""
    strategy: Any = "ddp"
    ranks = int(os.environ["WORLD_SIZE"])
    if side == "unishard":
        from unishard.integrations.lightning import UnishardFabricStrategy

        strategy = UnishardFabricStrategy(config(case))
    elif case.strategy != "no_shard":

        def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
            for unit in (*case.units(model), model):
                fully_shard(unit, mesh=mesh["data_parallel"], reshard_after_forward=case.strategy == "full_shard")
            return model

        strategy = ModelParallelStrategy(parallelize, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(strategy=strategy, devices=ranks, accelerator="cpu")
    fabric.launch()
    model: Any = case.build()
    if side == "own" and case.strategy != "no_shard":
        model = fabric.setup(model)  # FSDP2 replaces the parameters
        optimizer: Any = fabric.setup_optimizers(adamw(model))
    else:
        model, optimizer = fabric.setup(model, adamw(model))
    batches = case.micro_batches(fabric.global_rank)
    while True:
        losses = []
        for turn in range(case.size.accumulation):
            last = turn == case.size.accumulation - 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(**next(batches)).loss
                fabric.backward(loss / case.size.accumulation)
            losses.append(loss.detach())
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pause(torch.stack(losses).mean())
