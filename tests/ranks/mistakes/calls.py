"""Names and arguments that people know from other tools, and inputs that torch does not take."""

from __future__ import annotations

import torch
from harness import checked as config
from harness import own_share, prepare
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import unishard
from mistakes.data import samples
from mistakes.mistake import mistake
from unishard.testing.models import mlp


@mistake("`engine.zero_grad()`", "zero_grad")
@mistake(
    "`engine.clip_grad_norm_(...)`, and other names of Accelerate, Fabric, DeepSpeed and the Trainer", "clip_grad_norm_"
)
@mistake("`AdamW(engine.parameters())`", "parameters")
@mistake("`engine.head`, a part of the model", "head")
def name_of_another_tool(backend, name):
    with prepare(config(backend)) as engine:
        assert not hasattr(engine, name)
        getattr(engine, name)


CALLS = {
    "step": lambda engine, loss: (engine.backward(loss), engine.step(torch.tensor(0.5))),
    "mean": lambda engine, loss: engine.mean(torch.stack([loss, loss])),
    "list": lambda engine, loss: engine.mean([0.5, 1.5]),
    "dict": lambda engine, loss: list(engine.batches({"x": torch.ones(4, 13)})),
    "average": lambda engine, loss: AveragedModel(engine),
    "file": lambda engine, loss: engine.load("model.pt"),
    "state": lambda engine, loss: engine.load(mlp().state_dict()),
}


@mistake("`engine.step(loss)`", "step")
@mistake("`engine.mean` of a loss per sample", "mean")
@mistake("`engine.mean` of a list", "list")
@mistake("`engine.batches` of a dict of tensors", "dict")
@mistake("`AveragedModel(engine)`, or another copy of an engine", "average")
@mistake('`engine.load("model.pt")`', "file")
@mistake("`engine.load(state_dict)`", "state")
def call_of_another_tool(backend, call):
    with prepare(config(backend)) as engine:
        CALLS[call](engine, engine(**own_share(1)[0]).loss if call not in ("file", "state") else None)


ARGUMENTS = {
    "engine": lambda cfg: unishard.prepare(prepare(cfg), cfg),
    "order": lambda cfg: unishard.prepare(cfg, mlp()),
    "class": lambda cfg: unishard.prepare(nn.Linear, cfg),
    "list": lambda cfg: unishard.prepare([mlp(), mlp()], cfg),
    "wrapped": lambda cfg: unishard.prepare(nn.DataParallel(mlp()), cfg),
    "optimizer": lambda cfg: unishard.prepare(mlp(), torch.optim.AdamW(mlp().parameters()), cfg),
    "dict": lambda cfg: unishard.prepare(mlp(), {"backend": cfg.backend}),
    "loader": lambda cfg: unishard.dataloader(DataLoader(samples(4)), cfg),
    "columns": lambda cfg: unishard.dataloader({"x": torch.ones(4, 13)}, cfg),
    "swapped": lambda cfg: unishard.dataloader(cfg, samples(4)),
}


@mistake("`unishard.prepare(engine, cfg)`", "engine")
@mistake("`unishard.prepare(cfg, model)`", "order")
@mistake("`unishard.prepare(Model, cfg)`, the class", "class")
@mistake("`unishard.prepare([generator, critic], cfg)`", "list")
@mistake("`unishard.prepare(nn.DataParallel(model), cfg)`", "wrapped")
@mistake("`unishard.prepare(model, optimizer, cfg)`", "optimizer")
@mistake("`unishard.prepare(model, {...})`", "dict")
@mistake("`unishard.dataloader(DataLoader(...), cfg)`", "loader")
@mistake("`unishard.dataloader` of a dict of tensors", "columns")
@mistake("`unishard.dataloader(cfg, dataset)`", "swapped")
def arguments_in_another_order(backend, given):
    ARGUMENTS[given](config(backend))


class Tokens(nn.Module):
    """A tiny language model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(ids))


class Doubles(nn.Linear):
    """A linear layer."""

    def __init__(self):
        super().__init__(2, 2)


@mistake("a token id that the vocabulary does not have", Tokens, ((3, 11),))
@mistake("token ids padded with -100", Tokens, ((3, -100),))
@mistake("inputs in float64, as numpy makes them, under `precision: fp32`", Doubles, ((0.5, 1.5),))
def an_input_of_torch(backend, build, rows):
    with unishard.prepare(build(), config(backend)) as engine:
        engine(torch.tensor(rows, dtype=torch.float64 if isinstance(rows[0][0], float) else torch.int64))
