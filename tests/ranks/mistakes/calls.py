"""Arguments that people know from other tools."""

from __future__ import annotations

import torch
from harness import checked as config
from harness import own_share, prepare
from torch import nn
from torch.optim.swa_utils import AveragedModel

import unishard
from mistakes.mistake import mistake
from unishard.testing.models import mlp

CALLS = {
    "mean": lambda engine, loss: engine.mean(torch.stack([loss, loss])),
    "list": lambda engine, loss: engine.mean([0.5, 1.5]),
    "average": lambda engine, loss: AveragedModel(engine),
    "file": lambda engine, loss: engine.load("model.pt"),
}


@mistake("`engine.mean` of a loss per sample", "mean")
@mistake("`engine.mean` of a list", "list")
@mistake("`AveragedModel(engine)`, or another copy of an engine", "average")
@mistake('`engine.load("model.pt")`', "file")
def call_of_another_tool(backend, call):
    with prepare(config(backend, "no_shard")) as engine:
        CALLS[call](engine, engine(**own_share(1)[0]).loss if call != "file" else None)


ARGUMENTS = {
    "wrapped": lambda cfg: unishard.prepare(nn.DataParallel(mlp()), cfg),
    "dict": lambda cfg: unishard.prepare(mlp(), {"backend": cfg.backend}),
    "columns": lambda cfg: unishard.dataloader({"x": torch.ones(4, 13)}, cfg),
}


@mistake("`unishard.prepare(nn.DataParallel(model), cfg)`", "wrapped")
@mistake("`unishard.prepare(model, {...})`", "dict")
@mistake("`unishard.dataloader` of a dict of tensors", "columns")
def argument_of_another_kind(backend, given):
    ARGUMENTS[given](config(backend, "no_shard"))
